"""On the real target in float32: generate writes what transformers' generate writes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.data.anatomy import find_folder
from outrider.data.demo_target import DEMO_TARGET
from outrider.data.target import Target
from outrider.eval import generate
from outrider.eval.drafters.model import first_layers
from outrider.eval.link import tables
from outrider.heads import EagleConfig, EagleHead

pytestmark = pytest.mark.slow

SAID = [
    "Repeat this line three times: The harbour was quiet at dawn.",
    "Hi",
    "Write a Python function that adds up the squares of a list of numbers, and explain it.",
    "What is the capital of France?",
]


@pytest.fixture(scope="module")
def parts():
    folder = find_folder(DEMO_TARGET)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, padding_side="left")


def prompts(tokenizer, rows):
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": said}], tokenize=False, add_generation_prompt=True
        )
        for said in SAID[:rows]
    ]
    return tokenizer(texts, return_tensors="pt", padding=True)


@pytest.fixture(scope="module")
def head(parts):
    """Untrained: what falls must leave no trace either."""
    target = Target.from_model(parts[0], parts[1])
    torch.manual_seed(0)
    config = EagleConfig.from_target(target.config, tokenizer_size=target.tokenizer_size)
    return EagleHead(config).attach(tables(target)).eval()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    "draft", [None, "lookup:10", "suffix:8", "head chain:3", "head tree:3,4,12", "model chain:4"]
)
def test_greedy_text_is_that_of_transformers(parts, head, rows, draft):
    model, tokenizer = parts
    inputs = prompts(tokenizer, rows)
    wanted = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    settings = {"draft": draft}
    if draft is not None and " " in draft:
        kind, settings["draft"] = draft.split()
        settings["head"] = head
        if kind == "model":
            settings["head"] = first_layers(Target.from_model(model), 24)
    found = generate(model, inputs, max_new_tokens=48, return_dict_in_generate=True, **settings)
    assert found.sequences.tolist() == wanted.tolist()
    if draft == "lookup:10":
        assert any(one.accepted for row in found.statistics.rows for one in row.rounds)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rows", [1, 4])
def test_stop_strings_cut_where_transformers_cuts(parts, rows):
    model, tokenizer = parts
    inputs = prompts(tokenizer, rows)
    settings = {"max_new_tokens": 40, "stop_strings": ["at dawn", "\n\n"], "tokenizer": tokenizer}
    wanted = model.generate(**inputs, do_sample=False, **settings)
    found = generate(model, inputs, draft="lookup:10", **settings)
    assert found.tolist() == wanted.tolist()
    assert found.shape[1] < inputs["input_ids"].shape[1] + 40 or rows > 1
