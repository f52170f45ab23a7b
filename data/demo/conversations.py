"""The demo's prompts as requests to the target: which are answered, at which temperature."""

from outrider.data.answers import Request
from outrider.data.demo.prompts import KINDS, Prompt, prompts
from outrider.data.sampling import Sampling

TEMPERATURES = (0.0, 1.0)


def demo_requests(split: str, num_per_kind: int, seed: int = 0) -> list[Request]:
    """Requests of a split: held-out prompts at both temperatures, training prompts at one.

    Training temperatures alternate within a kind, so any start of the list is balanced over kinds
    and temperatures. A request's id is its prompt's id and the temperature.
    """
    chosen = prompts(split, num_per_kind, seed)
    if split == "heldout":
        return [_request(prompt, t) for prompt in chosen for t in TEMPERATURES]
    # The kinds are interleaved: len(KINDS) prompts in a row are one of each.
    return [
        _request(prompt, TEMPERATURES[index // len(KINDS) % 2])
        for index, prompt in enumerate(chosen)
    ]


def _request(prompt: Prompt, temperature: float) -> Request:
    return Request(
        id=f"{prompt.id}-t{temperature:g}",
        messages=prompt.messages,
        sampling=Sampling(temperature=temperature),
        extra={"kind": prompt.kind, "template": prompt.template, "split": prompt.split},
    )
