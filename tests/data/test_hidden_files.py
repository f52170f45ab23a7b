"""States that another engine extracted: found by their tokens, checked, and stored like our own."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.data.hidden_files import FileStates
from outrider.data.layout import layout_of
from outrider.data.rows import Row
from outrider.data.states import OnlineFeatures
from outrider.data.store import FeatureStore

LAYERS = (1, 3, 4)


def make_rows(count=6):
    made = torch.Generator().manual_seed(5)
    rows = []
    for index in range(count):
        ids = torch.randint(3, 300, (8 + index,), generator=made)
        rows.append(Row(ids, torch.arange(len(ids)) >= 3, f"row-{index}", "chat", 3))
    return rows


def extracted(target, ids, layers=LAYERS):
    """What vLLM and speculators write, from transformers' own outputs and a hook of our own."""
    before_norm = []
    hook = target.decoder.norm.register_forward_pre_hook(
        lambda _, args: before_norm.append(args[0])
    )
    with torch.no_grad():
        hidden = target.model(input_ids=ids[None], output_hidden_states=True).hidden_states
    hook.remove()
    states = [hidden[layer][0] for layer in layers] + [before_norm[0][0]]
    return torch.stack(states, dim=1)


@pytest.fixture
def folder(target, tmp_path):
    """Five files in speculators' naming, one in vLLM's with a generated token behind the row's."""
    path = tmp_path / "states"
    path.mkdir()
    for index, row in enumerate(make_rows()):
        name, ids = f"hs_{index}.safetensors", row.ids
        if index == 2:
            name, ids = "cmpl-7f3a-0.safetensors", torch.cat([ids, torch.tensor([9])])
        content = {"hidden_states": extracted(target, ids), "token_ids": ids}
        save_file(content, path / name)
    return path


def test_a_store_from_files_equals_one_that_the_target_made(target, folder, tmp_path):
    rows = make_rows()
    states = FileStates(folder, target, LAYERS, rows)
    store = FeatureStore.build_or_open(
        target,
        rows,
        layout=layout_of(target, LAYERS, "float32"),
        root=tmp_path / "store",
        states=states,
        progress=False,
    )
    online = OnlineFeatures(target, rows, layers=LAYERS)
    for index in range(len(rows)):
        ours, theirs = store.row(index), online.row(index)
        torch.testing.assert_close(ours.aux_TF, theirs.aux_TF, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.last_TH, theirs.last_TH, rtol=1e-4, atol=1e-4)


def test_files_may_be_stored_packed(target, folder, tmp_path):
    rows = make_rows()
    layout = layout_of(target, LAYERS, "int8", top_k=5)
    settings = {"layout": layout, "progress": False}
    files = FileStates(folder, target, LAYERS, rows)
    ours = FeatureStore.build_or_open(target, rows, root=tmp_path / "a", states=files, **settings)
    theirs = FeatureStore.build_or_open(target, rows, root=tmp_path / "b", **settings)
    assert ours.folder.local.name != theirs.folder.local.name
    a, b = ours.row(4), theirs.row(4)
    torch.testing.assert_close(a.law.log_probs, b.law.log_probs, rtol=1e-2, atol=2e-3)
    assert (a.aux_TF - b.aux_TF).float().norm() < 0.02 * b.aux_TF.float().norm()


def test_other_files_make_another_store(target, folder):
    rows = make_rows()
    before = FileStates(folder, target, LAYERS, rows).key()
    assert FileStates(folder, target, LAYERS, rows).key() == before
    path = folder / "hs_3.safetensors"
    states = extracted(target, rows[3].ids)
    save_file({"hidden_states": states * 1.001, "token_ids": rows[3].ids}, path)
    assert FileStates(folder, target, LAYERS, rows).key() != before


def refused(target, folder, message, layers=LAYERS, rows=None):
    with pytest.raises(ValueError, match=message):
        FileStates(folder, target, layers, rows or make_rows()).of(make_rows())


def test_a_row_without_a_file_is_refused(target, folder):
    rows = make_rows()
    rows[4].ids[-1] += 1
    refused(
        target, folder, "has no file whose token_ids begin with row row-4's 12 tokens", rows=rows
    )


def test_layers_off_by_one_are_refused(target, folder):
    refused(target, folder, "layer 2 of row row-0 differs from the target's own", layers=(1, 2, 4))


def test_a_wrong_number_of_layers_is_refused(target, folder):
    refused(
        target, folder, r"shape \(8, 4, 32\); layers \(1, 3\) .* need \[tokens, 3, 32\]", (1, 3)
    )


def test_a_last_state_after_the_norm_is_refused(target, folder):
    row = make_rows()[0]
    states = extracted(target, row.ids)
    states[:, -1] = target.run(row.ids[None]).last_BTH[0] * torch.linspace(1, 9, 32)
    save_file({"hidden_states": states, "token_ids": row.ids}, folder / "hs_0.safetensors")
    refused(target, folder, "the last state of row row-0 differs from the target's own")


def resave(folder, index, change):
    """Change the states of a row's file."""
    path = folder / f"hs_{index}.safetensors"
    content = load_file(path)
    save_file(content | {"hidden_states": change(content["hidden_states"]).contiguous()}, path)


def test_states_of_fewer_tokens_than_the_row_are_refused(target, folder):
    """As an engine writes them whose prefix cache holds the first tokens, or without the last."""
    resave(folder, 3, lambda x: x[4:])
    refused(target, folder, r"hs_3.safetensors holds hidden_states of 7 tokens for a row of 11")


@pytest.mark.parametrize("place", [0, -1])
def test_a_single_missing_state_is_refused(target, folder, place):
    def change(states):
        states[place] = 0
        return states

    resave(folder, 0, change)
    at = 0 if place == 0 else 7
    refused(target, folder, f"layer 1 of row row-0 differs .* by 1.00 of its length at token {at} ")


def test_states_that_are_no_numbers_are_refused_in_any_row(target, folder):
    def change(states):
        states[3, 1, 5] = torch.nan
        return states

    resave(folder, 4, change)
    refused(target, folder, "hs_4.safetensors holds hidden_states .* not all finite floats")


def test_states_of_another_row_are_refused_where_rows_are_checked(target, folder):
    other = load_file(folder / "hs_4.safetensors")["hidden_states"]
    resave(folder, 3, lambda x: other[: len(x)])
    refused(target, folder, "of row row-3 differs from the target's own")


def test_files_in_any_order_and_precision_are_matched_by_their_tokens(target, folder):
    rows = make_rows()
    for index in range(6):
        path = folder / f"hs_{index}.safetensors"
        if path.exists():
            path.rename(folder / f"z{9 - index}.safetensors")
            content = load_file(folder / f"z{9 - index}.safetensors")
            content["hidden_states"] = content["hidden_states"].bfloat16()
            content["token_ids"] = content["token_ids"].int()
            save_file(content, folder / f"z{9 - index}.safetensors")
    found = FileStates(folder, target, LAYERS, rows).of(rows[::-1])
    for row, states in zip(rows[::-1], found, strict=True):
        wanted = extracted(target, row.ids)[:, :-1].flatten(1)
        torch.testing.assert_close(states.aux_TF.float(), wanted, rtol=1e-2, atol=1e-2)


def test_a_folder_that_is_none_is_told(target, tmp_path):
    refused(target, tmp_path / "nowhere", "hidden_states .*nowhere is no folder")


def test_a_damaged_file_is_named(target, folder):
    path = folder / "hs_1.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    refused(target, folder, "hs_1.safetensors is damaged or holds no token_ids")
