import json

from torchtrain.config.load import load_job
from torchtrain.data.tokenizer import BytesTokenizer
from torchtrain.trainer.data_order import describe_data_order, find_changes


def describe(*overrides):
    return describe_data_order(load_job(None, ["dataset.sources=[{path: a.txt}]", *overrides]), BytesTokenizer())


def test_an_equal_job_has_no_changes_after_a_trip_through_json():
    assert find_changes(json.loads(json.dumps(describe())), describe()) == []


def test_changes_are_named_by_key_with_both_values():
    changes = find_changes(describe("training.seq_len=64"), describe("training.seq_len=32"))
    assert changes == ["training.seq_len: 64 in the checkpoint, 32 now"]


def test_the_batch_size_does_not_decide_the_order():
    assert find_changes(describe(), describe("training.global_batch_size=16")) == []


def test_a_checkpoint_that_does_not_say_is_not_warned_of():
    assert find_changes({}, describe()) == []
