"""How a cluster is reached: as the site file says, or by another kubeconfig under a name that the site file knows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks.core.errors import InputError
from tasks.core.spec import Site


@dataclass(frozen=True)
class Access:
    """What was chosen in place of the site file's own words; empty where nothing was.

    `kubeconfig` is the path of one file, `context` the name by which that file calls the site's cluster.
    """

    kubeconfig: str = ""
    context: str = ""

    @property
    def chosen(self) -> bool:
        """Whether anything is reached otherwise than the site file says."""
        return bool(self.kubeconfig or self.context)


AS_WRITTEN = Access()


def reached_by(site: Site, access: Access) -> Site:
    """Return the site with the chosen kubeconfig and context in place of its own.

    A site file is the statement of which cluster is meant: only a name that stands in it is taken, and the current
    context of a file never decides.

    Raises:
        InputError: the site file does not name the context, or names none at all.
    """
    if not access.chosen:
        return site
    named = site.contexts
    context = access.context or site.context
    if not context or context not in named:
        raise InputError(
            "K2-INP-009",
            "The site file does not name this context: is it the cluster that is meant?",
            where="--context" if access.context else f"site {site.name}: context",
            got=access.context or "nothing",
            expected=f"one of {', '.join(named)}" if named else "a context in the site file, and it has none",
            hint="the site file says which cluster is meant: use a name that it has, or add this one to its "
            "other_contexts",
        )
    return replace(site, kubeconfig=access.kubeconfig or site.kubeconfig, context=context)
