"""Every error code: its exit code, what it means, and what to do. Codes are part of the public surface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType


class ExitCode(IntEnum):
    """Exit codes of `k2ctl`; part of the public surface."""

    DONE = 0
    UNEXPECTED = 1
    INVALID_INPUT = 2
    PLAN_HAS_CHANGES = 3
    GATE_FAILED = 4
    INTEGRITY = 5
    NOT_READY = 6
    CONFLICT = 7
    CAPACITY = 8
    INCONCLUSIVE = 9
    REVERTED = 10
    UNAVAILABLE = 11


@dataclass(frozen=True)
class CatalogueEntry:
    """One stable code: its class of failure, what it means and what to do. Shown by `k2ctl explain CODE`."""

    code: str
    exit_code: ExitCode
    meaning: str
    remedy: str


def _catalogue(*entries: CatalogueEntry) -> Mapping[str, CatalogueEntry]:
    return MappingProxyType({entry.code: entry for entry in entries})


CATALOGUE: Mapping[str, CatalogueEntry] = _catalogue(
    CatalogueEntry(
        "K2-INP-001",
        ExitCode.INVALID_INPUT,
        "A file or parameter does not parse.",
        "Correct the named field; `k2ctl explain` and the JSON schema beside the file list what is allowed.",
    ),
    CatalogueEntry(
        "K2-INP-002",
        ExitCode.INVALID_INPUT,
        "The revision is not a 40-hex commit of the repository.",
        "Lock it: `k2ctl lock REPO --revision R` resolves a branch once and pins the commit.",
    ),
    CatalogueEntry(
        "K2-INP-003",
        ExitCode.INVALID_INPUT,
        "A path in the checkpoint is unsafe.",
        "Do not use this revision; report it to its owner.",
    ),
    CatalogueEntry(
        "K2-INP-004",
        ExitCode.INVALID_INPUT,
        "Index, shards and sizes of the checkpoint disagree.",
        "The upload is incomplete or inconsistent at this commit; choose another revision.",
    ),
    CatalogueEntry(
        "K2-INP-005",
        ExitCode.INVALID_INPUT,
        "The engine arguments cannot work for this model and topology.",
        "Correct the profile; the finding names the argument and the rule.",
    ),
    CatalogueEntry(
        "K2-INP-006",
        ExitCode.INVALID_INPUT,
        "State was written by a newer version of this tool.",
        "Use that version or a newer one; nothing was changed.",
    ),
    CatalogueEntry(
        "K2-INP-007",
        ExitCode.INVALID_INPUT,
        "The release is not known.",
        "Pass a path to its YAML file, or an id that stands in the site's releases directory.",
    ),
    CatalogueEntry(
        "K2-INP-008",
        ExitCode.INVALID_INPUT,
        "The API server refuses an object (dry run).",
        "Correct the manifest; nothing was stored.",
    ),
    CatalogueEntry(
        "K2-INP-009",
        ExitCode.INVALID_INPUT,
        "The cluster is not one that the site file names.",
        "Nothing was changed. Use the site file of that cluster, or a name and a kubeconfig that lead to this one.",
    ),
    CatalogueEntry(
        "K2-INT-001",
        ExitCode.INTEGRITY,
        "Bytes that arrived do not have the digest of the lock.",
        "Nothing unverified was kept. Run the release again; if the same file differs again the source is "
        "wrong: compare with another mirror and report it.",
    ),
    CatalogueEntry(
        "K2-INT-002",
        ExitCode.INTEGRITY,
        "Bytes at rest differ from the lock: on a node, in a directory, in the store.",
        "Start no engine there. `k2ctl scrub --node NODE` puts the live and the rollback release right; for any other, "
        "delete the named file: the next release of these weights stages it anew.",
    ),
    CatalogueEntry(
        "K2-INT-003",
        ExitCode.INTEGRITY,
        "A stored document does not have the digest under which it is kept.",
        "The store returned other bytes than were written; check the store before anything else.",
    ),
    CatalogueEntry(
        "K2-INT-004",
        ExitCode.INTEGRITY,
        "A staging marker is missing, foreign or does not match.",
        "Run the release again: the stager verifies what is there and stages what is missing.",
    ),
    CatalogueEntry(
        "K2-INT-005",
        ExitCode.INTEGRITY,
        "Another lock was accepted for the same commit before.",
        "A commit never changes: one of the two sources lies. Compare both locks file by file; nothing was changed.",
    ),
    CatalogueEntry(
        "K2-INT-006",
        ExitCode.INTEGRITY,
        "The lock has no good signature of the key that is asked for.",
        "Find out who made or changed this lock; its owner signs: `k2ctl lock REPO --revision R --sign-key KEY`.",
    ),
    CatalogueEntry(
        "K2-UNA-001",
        ExitCode.UNAVAILABLE,
        "A service did not answer, or answered with an error of its own.",
        "Check that it is up, then run the same command again; it resumes.",
    ),
    CatalogueEntry(
        "K2-UNA-002",
        ExitCode.UNAVAILABLE,
        "The flow run died before it could say how it ended.",
        "Run the same command again; it resumes at the first unfinished step.",
    ),
    CatalogueEntry(
        "K2-UNA-003",
        ExitCode.UNAVAILABLE,
        "A worker Job ended without a result.",
        "Read its log (`kubectl logs job/NAME`), then run the same command again.",
    ),
    CatalogueEntry(
        "K2-UNA-004",
        ExitCode.UNAVAILABLE,
        "A webhook of the cluster does not answer, so the API server cannot take the object.",
        "See to the pods of the named webhook's service, then run the same command again; it resumes.",
    ),
    CatalogueEntry(
        "K2-UNA-005",
        ExitCode.UNAVAILABLE,
        "A step was ended because the step that it works with has failed.",
        "See to the error of the other step, then run the same command again; both resume.",
    ),
    CatalogueEntry(
        "K2-CAP-001",
        ExitCode.CAPACITY,
        "Not enough free nodes or GPUs for the release.",
        "Free nodes (`k2ctl retire RELEASE -y`), wait for the retire hold, or choose a smaller topology.",
    ),
    CatalogueEntry(
        "K2-CAP-002",
        ExitCode.CAPACITY,
        "Not enough free space for the weights.",
        "`k2ctl gc` lists the checkpoints that nothing needs; with -y they go, through a trash.",
    ),
    CatalogueEntry(
        "K2-CAP-003",
        ExitCode.CAPACITY,
        "A quota of the namespace has no room for what the release makes.",
        "Raise the named ResourceQuota or take down what counts against it, then run the same command again.",
    ),
    CatalogueEntry(
        "K2-CON-001",
        ExitCode.CONFLICT,
        "Another release holds the traffic lease.",
        "Wait for it or end it; `k2ctl status` names the holder.",
    ),
    CatalogueEntry(
        "K2-CON-002",
        ExitCode.CONFLICT,
        "A newer holder has written the route: this one is fenced off.",
        "Nothing was written. `k2ctl status` shows who moves traffic now.",
    ),
    CatalogueEntry(
        "K2-CON-003",
        ExitCode.CONFLICT,
        "The route was changed by somebody else during the shift.",
        "Stopped without writing over it. Read the route, agree with that person, then run promote again.",
    ),
    CatalogueEntry(
        "K2-CON-004",
        ExitCode.CONFLICT,
        "The live release changed since this one was planned.",
        "Run `k2ctl plan` again and decide anew.",
    ),
    CatalogueEntry(
        "K2-CON-005",
        ExitCode.CONFLICT,
        "A field of ours is owned by another field manager.",
        "Read `kubectl get ... --show-managed-fields`; give the field back or take the object out of the site.",
    ),
    CatalogueEntry(
        "K2-CON-006",
        ExitCode.CONFLICT,
        "The release has not reached the state that this command needs.",
        "`k2ctl status` shows the step it stands at.",
    ),
    CatalogueEntry(
        "K2-CON-007",
        ExitCode.CONFLICT,
        "A rehearsal site is up already, where another was to start.",
        "Use it (`k2ctl status`) or end it: `k2ctl rehearse --stop`.",
    ),
    CatalogueEntry(
        "K2-CON-008",
        ExitCode.CONFLICT,
        "The weights of another release are being staged on a node.",
        "Wait for that release or end it: `kubectl -n k2 get lease k2-stage-NODE` and its Job name what is staged.",
    ),
    CatalogueEntry(
        "K2-RDY-001",
        ExitCode.NOT_READY,
        "The engines were not ready before the deadline.",
        "Read the diagnoses; fix the named node or rank, then run the release again.",
    ),
    CatalogueEntry(
        "K2-RDY-002",
        ExitCode.NOT_READY,
        "A node that the release needs is not usable.",
        "Repair or cordon the named node and run the release again.",
    ),
    CatalogueEntry(
        "K2-RDY-003",
        ExitCode.NOT_READY,
        "The router does not see the engines it should.",
        "Check the router's ServiceAccount and label selectors; `kubectl logs` of the router says why.",
    ),
    CatalogueEntry(
        "K2-RDY-004",
        ExitCode.NOT_READY,
        "Preflight found problems on the chosen nodes.",
        "Each finding names the node and the remedy; nothing was changed.",
    ),
    CatalogueEntry(
        "K2-RGT-001",
        ExitCode.NOT_READY,
        "The identity that k2ctl uses lacks rights on the cluster.",
        "Have an administrator give it the named rules: `k2ctl site init` applies those of manifests/base again.",
    ),
    CatalogueEntry(
        "K2-GAT-001",
        ExitCode.GATE_FAILED,
        "A gate failed; no user was touched.",
        "Read why: `k2ctl status RELEASE`, artifact k2-gate-NAME. Fix the cause and make a new release.",
    ),
    CatalogueEntry(
        "K2-GAT-002",
        ExitCode.INCONCLUSIVE,
        "A gate has no usable data: it neither passed nor failed.",
        "Read why in the verdict; run the release again, the gate is measured anew.",
    ),
    CatalogueEntry(
        "K2-REV-001",
        ExitCode.REVERTED,
        "The shift was reverted after users were touched.",
        "All traffic is on the stable release. Read the failed check before the next try.",
    ),
    CatalogueEntry(
        "K2-REV-002",
        ExitCode.REVERTED,
        "The shift needs a person: it holds, went to the candidate because stable is dead, or is not proved.",
        "Decide by hand: `k2ctl status`, then the route's weights; automation does not move on.",
    ),
    CatalogueEntry(
        "K2-UNX-001",
        ExitCode.UNEXPECTED,
        "An error that this tool does not know.",
        "Report it with the log; the release resumes when run again.",
    ),
)
