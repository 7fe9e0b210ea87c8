"""The results folder: addressed by content, safe with several writers, honest about damage."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from experiments.store import Store, StoreError, key_of, make_result

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Config:
    lr: float = 0.1
    sizes: tuple[int, ...] = (3, 2)


def result(seed=1, value=1.0):
    return make_result("tab:VOC", "demo", seed, Config(), {"v": value}, 0.5, "1", "a command")


def test_a_result_comes_back_as_it_was_stored(tmp_path):
    store = Store(tmp_path)
    store.append([result(1), result(2)])
    assert store.results() == [result(1), result(2)]
    keys = [one.key for one in store.results()]
    assert key_of("tab:VOC", Config(), 2, "1") in keys
    assert key_of("tab:VOC", Config(lr=0.2), 2, "1") not in keys


def test_the_key_changes_with_everything_that_decides_a_result():
    keys = {
        key_of("a", Config(), 1, "1"),
        key_of("b", Config(), 1, "1"),
        key_of("a", Config(sizes=(2, 3)), 1, "1"),
        key_of("a", Config(), 2, "1"),
        key_of("a", Config(), 1, "2"),
    }
    assert len(keys) == 5
    assert key_of("a", Config(), 1, "1") in keys


WRONG_KIND = json.dumps(asdict(result()) | {"metrics": 3}).encode()


@pytest.mark.parametrize(
    "damage",
    [b"{not json", json.dumps({"key": "x"}).encode(), b'"text"', b"[1]", b"\xff\xfe{}", b"\0\0\0",
     b'{"key": "a\xe2\x80\xa8', WRONG_KIND],
    ids=["no JSON", "fields missing", "a text", "a list", "no UTF-8", "zeros", "cut short",
         "a field of another kind"],
)  # fmt: skip
def test_a_damaged_line_is_named_and_repair_loses_nothing(tmp_path, damage):
    store = Store(tmp_path)
    store.append([result(1)])
    with store.file.open("ab") as file:
        file.write(damage)  # without a newline: a writer died here
    store.append([result(2)])
    with pytest.raises(StoreError, match=r"results\.jsonl, line 2 .*repair"):
        store.results()
    assert store.repair() == 1
    assert [r.seed for r in store.results()] == [1, 2]
    assert Path(f"{store.file}.rejected").read_bytes() == damage + b"\n"
    assert store.repair() == 0


def test_writers_in_several_processes_lose_no_line(tmp_path):
    code = (
        "import sys; from pathlib import Path; from dataclasses import dataclass\n"
        "from experiments.store import Store, make_result\n"
        "@dataclass\nclass C: text: str = 'x' * 20000\n"
        "for i in range(20):\n"
        "    Store(Path(sys.argv[1])).append("
        "[make_result('l', 's', int(sys.argv[2]) + i, C(), {}, 0.0, '1', '')])\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(start)], cwd=ROOT)
        for start in (0, 100, 200)
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert {r.seed for r in Store(tmp_path).results()} == {
        start + i for start in (0, 100, 200) for i in range(20)
    }


def test_a_configuration_must_be_a_dataclass():
    with pytest.raises(TypeError, match="dataclass instance"):
        key_of("a", {"lr": 1}, 1, "1")
