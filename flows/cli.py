"""`k2ctl`: parse, call, and turn an outcome into an exit code. Data on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TypeAlias

from flows.console.command_line import Parser, cpus, named, positive, seconds
from tasks.core.errors import CATALOGUE, ExitCode, InputError, K2Error

_EPILOG = """exit codes:
  0 done                       5 integrity                10 reverted or parked after users were touched
  1 unexpected                 6 not ready                11 unavailable: try again
  2 invalid input              7 conflict
  3 plan has changes           8 capacity
  4 gate failed, no user       9 inconclusive
    was touched

first time here?
  k2ctl rehearse               the whole release on this machine, no GPU
  k2ctl rehearse --keep        ... and leave everything up, with the URLs
  k2ctl explain                every error code, what it means and what to do
"""


def _deferred(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    """Return a command that is imported when it runs: `--help` must not wait for the libraries behind it."""

    def run(args: argparse.Namespace) -> int:
        return int(getattr(import_module(module), name)(args))

    return run


_CARING = "flows.console.caring"
_REPORTS, _RELEASING, _REHEARSING = "flows.console.reports", "flows.console.releasing", "flows.console.rehearsing"
_LOCKS = "flows.console.locks"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    parser = Parser(
        prog="k2ctl",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Takes Kimi K2 from a Hugging Face revision to live traffic: verified on "
        "every node, gated, shifted step by step, with a receipt.",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks and library logs")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_reading(commands)
    _add_acting(commands)
    _add_caring(commands)
    _add_site(commands)
    _add_rehearse(commands)
    return parser


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def _command(commands: Commands, name: str, module: str, summary: str, *, site: bool = True) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(run=_deferred(module, name.replace("-", "_")))
    command.add_argument("--json", action="store_true", help="one JSON document on standard output")
    if site:
        command.add_argument(
            "--site",
            default="",
            metavar="FILE",
            help="site file; default: $K2_SITE, else the rehearsal site that was kept",
        )
        _add_access(command)
    return command


def _add_access(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--kubeconfig",
        type=named,
        metavar="PATH",
        help="another kubeconfig than the site file's; its current context is never used, nor is $KUBECONFIG",
    )
    command.add_argument(
        "--context",
        type=named,
        metavar="NAME",
        help="one of the contexts that the site file names; any other is refused (default: its context)",
    )


def _add_reading(commands: Commands) -> None:
    _add_locks(commands)
    _add_verify(commands)
    command = _command(commands, "plan", _REPORTS, "Say what a release would change. Reads only.")
    command.add_argument("release", metavar="RELEASE", help="id, or path of a release file")
    command.add_argument("--detailed-exitcode", action="store_true", help="exit 3 when there are changes")
    command = _command(commands, "render", _REPORTS, "Write the Kubernetes objects of a release as YAML.")
    command.add_argument("release", metavar="RELEASE", help="id, or path of a release file")
    command.add_argument("-o", "--output", default="", metavar="FILE", help="file (default: standard output)")
    command = _command(
        commands, "status", "flows.console.standing", "Say what is live, what the route does, where a release stands."
    )
    command.add_argument("release", metavar="RELEASE", nargs="?", default="", help="id, or path of a release file")
    command = _command(
        commands, "receipt", _REPORTS, "Show a release's receipt; --verify recomputes every digest in it."
    )
    command.add_argument("release", metavar="RELEASE", help="id of a promoted release")
    command.add_argument("--verify", action="store_true", help="recompute everything, down to the bytes on each node")
    command = _command(commands, "explain", _REPORTS, "Say what an error code means and what to do.", site=False)
    command.add_argument("code", metavar="CODE", nargs="?", default="", help="such as K2-INT-001 (default: all)")
    command = _command(commands, "ask", _REPORTS, "Send one prompt the way users go.")
    command.add_argument("prompt", metavar="PROMPT")
    command.add_argument("--serving", default="", metavar="DIGEST", help="ask this set by its probe route (12 hex)")
    command.add_argument("--max-tokens", type=positive, default=64)
    command.add_argument("--model", default="kimi-k2", help="served model name (default: %(default)s)")


def _add_verify(commands: Commands) -> None:
    command = _command(
        commands,
        "verify",
        "flows.console.verifying",
        "Compare a directory, the store or all nodes with a lock, byte for byte.",
    )
    command.usage = "k2ctl verify LOCK (--dir D | --store [URI] | --nodes) [option ...]"
    command.add_argument("lock", metavar="LOCK", help="lock file, a lock's digest in the site's store, or a release")
    place = command.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--dir", type=named, metavar="D", help="directory with the files, also of a git-lfs checkout or the Hub's cache"
    )
    place.add_argument(
        "--store",
        nargs="?",
        const="",
        metavar="URI",
        help="the site's object store, or s3://BUCKET/PREFIX at its endpoint; its bytes come to this machine",
    )
    place.add_argument("--nodes", action="store_true", help="every node that has it staged, by a Job on each")
    command.add_argument(
        "--threads", type=positive, default=cpus(), help="files hashed at once (default: the CPUs, %(default)s)"
    )
    command.add_argument(
        "--at-once", type=positive, default=16, metavar="N", help="with --nodes: how many at a time (default: 16)"
    )
    command.add_argument(
        "--fail-on-extra", action="store_true", help="exit 5 also for files that the lock does not have"
    )


def _add_locks(commands: Commands) -> None:
    command = _command(commands, "lock", _LOCKS, "Pin a revision: every file's size and digest, from the Hub.")
    command.add_argument("repo", metavar="REPO", help="owner/name")
    command.add_argument("--revision", default="main", help="branch, tag or commit; resolved once (default: main)")
    command.add_argument(
        "--output", default="manifests/locks", metavar="DIR", help="where to write (default: %(default)s)"
    )
    command.add_argument(
        "--again", action="store_true", help="from the Hub although the site has accepted one; another one is exit 5"
    )
    command.add_argument(
        "--ignore-total-size", action="store_true", help="accept an index whose total_size is not that of the tensors"
    )
    command.add_argument(
        "--sglang-checksums", default="", metavar="FILE", help="also write the list for SGLang's --model-checksum FILE"
    )
    command.add_argument("--sign-key", default="", metavar="PEM", help="sign it with this private key, of a curve")
    _add_password(command)
    command = _command(commands, "lock-sign", _LOCKS, "Sign a lock file; no network, no site.", site=False)
    command.add_argument("lock", metavar="LOCK", help="lock file")
    command.add_argument("--key", required=True, metavar="PEM", help="private key: EC P-256, P-384 or P-521")
    command.add_argument("-o", "--output", default="", metavar="FILE", help="signature file (default: beside LOCK)")
    _add_password(command)
    command = _command(
        commands, "lock-verify", _LOCKS, "Check the signature of a lock file; no network, no site.", site=False
    )
    command.add_argument("lock", metavar="LOCK", help="lock file")
    command.add_argument("--key", required=True, metavar="PEM", help="public key of the signer")
    command.add_argument("--signature", default="", metavar="FILE", help="signature file (default: beside LOCK)")
    command = _command(commands, "lock-accept", _LOCKS, "Have a site take a lock file that was made elsewhere.")
    command.add_argument("lock", metavar="LOCK", help="lock file")
    command.add_argument(
        "--signature", default="", metavar="FILE", help="signature file (default: the one beside LOCK, if there is one)"
    )


def _add_password(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--password-file", default="", metavar="FILE", help="file with the password of an encrypted private key"
    )


def _add_acting(commands: Commands) -> None:
    for name, summary in (
        ("release", "Bring a release to gated; with --yes let it have traffic. Resumes."),
        ("promote", "Let a gated release have traffic: shift by its plan, then promote. Needs -y."),
        ("retire", "Take down a replaced release after its hold; weights stay. Needs -y."),
    ):
        command = _command(commands, name, _RELEASING, summary)
        command.add_argument("release", metavar="RELEASE", help="id, or path of a release file")
        where = command.add_mutually_exclusive_group()
        where.add_argument(
            "--submit",
            action="store_true",
            help="as a run of the deployment, and wait (default where the site has a Prefect server)",
        )
        where.add_argument("--local", action="store_true", help="in this process")
        command.add_argument("-y", "--yes", action="store_true", help="approve what moves traffic or deletes")
        command.add_argument("--approver", default="", help="who approves (default: the user)")
        command.add_argument("--comment", default="", help="why; kept in the receipt")
        if name == "release":
            command.add_argument("--dry-run", action="store_true", help="show the plan and stop")


def _add_caring(commands: Commands) -> None:
    for name, summary in (
        ("scrub", "Read every byte of what is live again on its nodes; put right what has rotted."),
        ("gc", "List the weights that nothing needs; with -y let them go, through a trash."),
    ):
        command = _command(commands, name, _CARING, summary)
        command.add_argument(
            "--node", action="append", default=[], metavar="N", help="only this node; may be given again (default: all)"
        )
        where = command.add_mutually_exclusive_group()
        where.add_argument(
            "--submit",
            action="store_true",
            help="as a run of the deployment, and wait (default where the site has a Prefect server)",
        )
        where.add_argument("--local", action="store_true", help="in this process")
        if name == "gc":
            command.add_argument(
                "-y", "--yes", action="store_true", help="carry it out (default: list and change nothing)"
            )
            command.add_argument(
                "--trash-age-s",
                type=seconds,
                metavar="S",
                help="delete what has been in the trash for so long (default: staging.trash_age_s of the site file); "
                "never what this run moves there",
            )


def _add_site(commands: Commands) -> None:
    command = _command(
        commands, "site", "flows.console.sites", "Set a cluster up once (init), or contact all of it (check)."
    )
    command.add_argument("action", choices=("init", "check"), help="init applies base objects and parks all traffic")
    command.add_argument(
        "--release",
        default="",
        metavar="RELEASE",
        help="init: the release whose tool image is used; check: whose revision the Hub is asked for (default: live)",
    )


def _add_rehearse(commands: Commands) -> None:
    command = _command(
        commands,
        "rehearse",
        _REHEARSING,
        "Run a whole release on this machine: real servers, simulated engines, no GPU.",
        site=False,
    )
    command.add_argument(
        "--site",
        type=named,
        metavar="FILE",
        help="on this site instead, a cluster of your own; its file has to say `rehearsal: true`",
    )
    _add_access(command)
    command.add_argument(
        "--releases",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="with --site: made live first, then the candidate (default: the two files in the site's releases_dir)",
    )
    command.add_argument("--full", action="store_true", help="two units of 4P+12D on 32 nodes (default: 1P+2D on 6)")
    command.add_argument("--first", action="store_true", help="nothing live before")
    command.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="NAME",
        help="make it fail: shard-bitflip, gate-miss, node-lost, slo-breach, apiserver-killed",
    )
    command.add_argument("--keep", action="store_true", help="leave everything up and print the URLs")
    command.add_argument("--stop", action="store_true", help="stop the site that --keep left up")
    command.add_argument("--site-only", action="store_true", help="bring up the site with a live release and keep it")
    command.add_argument(
        "--dir", default="", metavar="D", help="where the site lives (default: a new temporary directory)"
    )
    command.add_argument(
        "--topology",
        choices=("auto", "store", "exchange", "hub"),
        help="how weights come onto the nodes: staging.topology of the site (default: auto)",
    )
    command.add_argument("--seed", type=int, help="seed of the model's weights (default: 1)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `k2ctl` and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser().parse_args(words)
    except InputError as error:
        return _fail(argparse.Namespace(json="--json" in words), error)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.ERROR, stream=sys.stderr)
    # What a flow says is shown by the command itself; the libraries' own lines only with -v.
    logging.getLogger("prefect").propagate = args.verbose
    os.environ.setdefault("DO_NOT_TRACK", "1")
    try:
        return int(args.run(args))
    except K2Error as error:
        return _fail(args, error)
    except KeyboardInterrupt as stopped:
        return _interrupted(args, str(stopped) or "interrupted; run the same command again to resume")
    except BrokenPipeError:
        return ExitCode.DONE
    except Exception as error:
        if args.verbose:
            traceback.print_exc()
        return _fail(
            args,
            K2Error(
                "K2-UNX-001",
                f"{type(error).__name__}: {error}",
                where=f"k2ctl {args.command}",
                hint=f"run it again with -v before the command for the traceback ({CATALOGUE['K2-UNX-001'].remedy})",
            ),
        )


def _interrupted(args: argparse.Namespace, message: str) -> int:
    print(message, file=sys.stderr)
    if getattr(args, "json", False):
        print(json.dumps({"version": 1, "outcome": "interrupted", "message": message}, indent=2))
    return 130


def _fail(args: argparse.Namespace, error: K2Error) -> int:
    print(error.as_text(), file=sys.stderr)
    if getattr(args, "json", False):
        print(json.dumps({"version": 1, "outcome": "failed", "error": error.as_data()}, indent=2))
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
