"""Text, tokenizer and batches of the trainer."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from qsdp.trainer import text, tokenizer
from qsdp.trainer.batches import (
    TextBatches,
    batch_starts,
    num_windows,
    validation_starts,
    windows,
)
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.data import prepare_data
from qsdp.trainer.ranks import Ranks
from qsdp.trainer.stream import StreamBatches, encode_validation

MARKDOWN = r"""# Hamlet

### SCENE I. Elsinore.

_FRANCISCO at his post. Enter to him BERNARDO_

**HAMLET**  
_\[Aside]_  
A little more than kin, and less than kind.

**KING CLAUDIUS**  
But now, *my* cousin Hamlet, and my son,\--
"""  # noqa: W291

PLAIN = """Hamlet

SCENE I. Elsinore.

FRANCISCO at his post. Enter to him BERNARDO

HAMLET:
[Aside]
A little more than kin, and less than kind.

KING CLAUDIUS:
But now, my cousin Hamlet, and my son,--
"""


def test_plain_text_drops_markdown_and_keeps_words():
    assert text.plain_text(MARKDOWN) == PLAIN


def test_plays_hold_out_whole_plays_and_no_markdown_is_left():
    """A play is trained on or validated on, never both; no mark-up reaches the tokenizer."""
    plays = text.plays()
    assert (len(plays.train), len(plays.valid)) == (34, 4)
    assert not set(plays.train) & set(plays.valid)
    for play in plays.train + plays.valid:
        assert not set("*_#\\") & set(play)
        assert "HAMLET:" in play if play.startswith("Hamlet") else True


def test_held_out_tail_is_cut_at_a_line(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("".join(f"line {i}\n" for i in range(100)))
    train, valid = text.read_text(TrainConfig(data=(file,), valid_fraction=0.2))
    assert train[0] + valid[0] == file.read_text()
    assert train[0].endswith("\n") and valid[0].startswith("line 8")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe", "is not UTF-8"), (b" \n", "holds no text"), (b"no line end", "no text to")],
)
def test_bad_text_is_named(tmp_path, content, message):
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        text.read_text(TrainConfig(data=(file,)))
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def small_tokenizer(tmp_path_factory):
    """A tokenizer of 300 tokens and the folder that it is cached in."""
    folder = tmp_path_factory.mktemp("cache")
    path = tokenizer.train_tokenizer(text.Text([PLAIN * 20], [PLAIN]), 300, folder)
    return tokenizer.load_tokenizer(path), path


def test_tokenizer_is_trained_once_for_a_text_and_a_size(small_tokenizer, monkeypatch):
    """The cache is keyed by all that the tokenizer depends on, the validation text not included."""
    _, path = small_tokenizer
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "Tokenizer", None)  # training again would fail
        again = tokenizer.train_tokenizer(text.Text([PLAIN * 20], ["other"]), 300, path.parent)
    assert again == path
    assert tokenizer.train_tokenizer(text.Text([PLAIN * 20], []), 301, path.parent) != path
    assert tokenizer.train_tokenizer(text.Text([PLAIN * 21], []), 300, path.parent) != path


def test_tokens_on_disk_decode_to_the_text(small_tokenizer, tmp_path):
    """Each document is closed by the end-of-text token, and nothing else is added."""
    bpe, _ = small_tokenizer
    tokens = tokenizer.open_tokens(tokenizer.encode_to_file([PLAIN, "Bernardo?"], bpe, tmp_path))
    assert bpe.decode(tokens) == PLAIN + "<|endoftext|>Bernardo?<|endoftext|>"
    assert len(bpe) == 300


def test_damaged_tokenizer_is_named(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text("{")
    with pytest.raises(ValueError, match="holds no tokenizer that can be read"):
        tokenizer.load_tokenizer(file)


def starts_of(step, *, seed=3, num_tokens=1000, length=10, batch_size=8):
    return batch_starts(num_tokens, length, batch_size, seed=seed, step=step)


def test_an_epoch_visits_disjoint_windows_once():
    """Windows of one epoch do not overlap, and their targets stay inside the text."""
    steps = num_windows(1000, 10) // 8
    starts = np.concatenate([starts_of(step) for step in range(1, steps + 1)])
    assert len(set(starts)) == len(starts) == steps * 8
    assert np.diff(np.sort(starts)).min() >= 10
    assert starts.min() >= 0 and starts.max() + 10 + 1 <= 1000


def test_batches_depend_on_seed_and_step_only():
    first = [starts_of(step) for step in (1, 2, 13)]
    again = [starts_of(step) for step in (13, 2, 1)][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(starts_of(1), starts_of(1, seed=4))
    assert not np.array_equal(starts_of(1), starts_of(13)), "epochs differ in order"


@pytest.mark.parametrize(("micro_batches", "num_ranks"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_ranks_and_micro_batches_share_out_one_global_batch(micro_batches, num_ranks):
    """A step sees the same windows, each once, however many ranks and micro-batches there are."""
    tokens = np.arange(1000, dtype=np.uint32)
    shape = (micro_batches, num_ranks, 8 // (micro_batches * num_ranks))
    parts = [
        TextBatches(tokens, 10, shape, rank=rank, seed=3).batch(5, micro_batch)
        for micro_batch in range(micro_batches)
        for rank in range(num_ranks)
    ]
    expected = windows(tokens, starts_of(5), 10)
    assert torch.equal(torch.cat(parts), expected)
    assert expected.shape == (8, 11) and expected.dtype == torch.int64


def test_text_shorter_than_a_batch_is_an_error():
    with pytest.raises(ValueError, match="give more --data or lower --batch-size"):
        TextBatches(np.zeros(80, np.uint32), 10, (1, 2, 4), rank=0, seed=0)


def test_validation_windows_are_spread_over_the_text():
    assert validation_starts(101, 10, 5).tolist() == [0, 20, 40, 60, 80]
    assert validation_starts(101, 10, 99).tolist() == list(range(0, 100, 10))
    with pytest.raises(ValueError, match="give a longer --valid"):
        validation_starts(10, 10, 5)


@pytest.mark.parametrize("given", [{"valid": True}, {"valid_fraction": 0.02}])
def test_short_validation_text_is_found_before_training(tmp_path, small_tokenizer, given, lone):
    """It would fail the first validation otherwise, which may come after the last step."""
    train, valid = tmp_path / "train.txt", tmp_path / "valid.txt"
    train.write_text("".join(f"{i} {PLAIN.replace(chr(10), ' ')}\n" for i in range(60)))
    valid.write_text("to be\n")
    config = TrainConfig(
        data=(train,),
        folder=tmp_path / "run",
        tokenizer=small_tokenizer[1],
        sequence_length=150,
        **{name: valid if value is True else value for name, value in given.items()},
    )
    with pytest.raises(ValueError, match="fewer than one window of 150; give a longer --valid"):
        prepare_data(config, lone)


@pytest.fixture
def lone(tmp_path):
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Ranks(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture
def stream_config(tmp_path, small_tokenizer):
    """A streamed data set out of a local JSON-lines file."""
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"speech {i}: {PLAIN}"}) + "\n" for i in range(12)))
    (tmp_path / "valid.txt").write_text(PLAIN)
    return TrainConfig(
        dataset="json",
        dataset_files=(file,),
        valid=tmp_path / "valid.txt",
        tokenizer=small_tokenizer[1],
        sequence_length=16,
    )


@pytest.mark.parametrize("done", [1, 5, 9, 16, 24])
def test_stream_continues_from_its_state(stream_config, small_tokenizer, done):
    """From the first epoch and from later ones, over the end of the data set, too; the state
    survives JSON."""
    ranks = Ranks(1, 2, torch.device("cpu"))

    def new():
        return StreamBatches(stream_config, small_tokenizer[0], 8, ranks)

    uninterrupted, resumed = new(), new()
    for step in range(1, done + 1):
        uninterrupted.batch(step, 0)
    state = json.loads(json.dumps(uninterrupted.state()))
    assert state["epoch"] == {1: 0, 5: 0, 9: 1, 16: 2, 24: 3}[done]
    resumed.load_state(state)
    for step in range(done + 1, done + 11):
        batch = uninterrupted.batch(step, 0)
        assert torch.equal(resumed.batch(step, 0), batch)
    assert batch.shape == (8, 17)
    assert torch.equal(batch[0, -1], batch[1, 0]), "windows share one token"


def test_stream_without_text_is_found_before_the_first_batch(stream_config, small_tokenizer):
    """More ranks than documents, or a wrong field."""
    with pytest.raises(ValueError, match="has no document for this rank"):
        StreamBatches(stream_config, small_tokenizer[0], 8, Ranks(12, 13, torch.device("cpu")))
    wrong = replace(stream_config, text_field="body")
    with pytest.raises(ValueError, match="--text-field must be one of text, got body"):
        StreamBatches(wrong, small_tokenizer[0], 8, Ranks(0, 1, torch.device("cpu")))


def test_stream_of_another_rank_is_another_text(stream_config, small_tokenizer):
    first, second = (
        StreamBatches(stream_config, small_tokenizer[0], 8, Ranks(r, 2, torch.device("cpu")))
        for r in range(2)
    )
    assert not torch.equal(first.batch(1, 0), second.batch(1, 0))


def test_stream_validation(stream_config, small_tokenizer, tmp_path):
    path = encode_validation(stream_config, small_tokenizer[0], tmp_path)
    assert small_tokenizer[0].decode(tokenizer.open_tokens(path)) == PLAIN + "<|endoftext|>"
