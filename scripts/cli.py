"""The `outrider` command: finds the sub-command and runs it; user errors become exit status 2."""

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version

# Name -> (module, help line). Modules are imported only when asked for: torch is slow to load.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo_command", "train, measure and report a real head on the embedded target"),
    "target": ("target_command", "fetch the embedded demo target and print its folder"),
    "generate": ("generate_command", "let the target answer prompts: on-policy training text"),
    "check": ("check_command", "check target, data, head and one step before training; --fix"),
    "plan": ("plan_command", "disk, memory and time of a run, from a config alone"),
    "features": ("features_command", "store the frozen target's features ahead of training"),
    "vocab": ("vocab_command", "choose draft vocabularies and tell the acceptance they can reach"),
    "trace": ("trace_command", "record the target's own text and features for scoring"),
    "tree": ("tree_command", "fit a static draft tree to a head on a trace"),
    "eval": ("eval_command", "exact acceptance of heads on a trace, without decoding"),
    "policies": ("policies_command", "draft-length policies, replayed exactly on a trace"),
    "decode": ("decode_command", "generate with a head, exactly, and show what was accepted"),
    "drift": ("drift_command", "acceptance in vLLM or SGLang against the offline prediction"),
    "names": ("names_command", "what vLLM, SGLang, EAGLE and others call the same counts"),
    "bench": ("bench_command", "wall-clock speed against plain decoding, interleaved"),
    "tune": ("tune_command", "what speculation buys by batch, and the settings for engines"),
    "lossy": ("lossy_command", "the bias of inexact acceptance rules, kept apart"),
    "certify": ("certify_command", "prove every verification rule exact, and every fault found"),
    "toy": ("toy_command", "the four-token language: exact laws beside simulation"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one sub-command; a `ValueError` prints its message and exits with status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return
    if arguments[0] == "--version":
        print(f"outrider {version('outrider')}")
        return
    name, *rest = arguments
    if name not in COMMANDS:
        sys.exit(_complain(f"no sub-command called {name!r}; choose one of {', '.join(COMMANDS)}"))
    module = importlib.import_module(f"outrider.scripts.{COMMANDS[name][0]}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("always", module=r"outrider\.")
            warnings.showwarning = _note
            module.main(rest)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError) as error:
        if os.environ.get("OUTRIDER_TRACEBACK"):
            raise
        sys.exit(_complain(f"outrider {name}: {error}"))
    except KeyboardInterrupt:
        print(f"\noutrider {name}: stopped; the same command continues", file=sys.stderr)
        sys.exit(130)


def usage() -> str:
    """The text of `outrider --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: outrider COMMAND [options]   (each command has --help)",
            "",
            *lines,
            "",
            "training: accelerate launch train/{eagle,medusa,hydra,mtp}.py --help",
            "OUTRIDER_TRACEBACK=1 shows where an error came from.",
        ]
    )


def _note(message: Warning | str, *_: object, **__: object) -> None:
    print(f"note: {message}", file=sys.stderr)


def _complain(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
