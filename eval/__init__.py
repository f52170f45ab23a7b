"""Is it exact, how good is it, what will it buy?"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.eval.generation.run import generate

__all__ = ["generate"]


def __getattr__(name: str) -> object:
    # When asked for: every module of this room imports this file, most need none of it.
    if name == "generate":
        from outrider.eval.generation.run import generate

        return generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
