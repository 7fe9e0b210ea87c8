"""Downloads from a real local server: checked, atomic, and refused when wrong."""

import functools
import gzip
import hashlib
import http.server
import os
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest

from curvlab.storage import StorageError
from curvlab.tasks import DataError, mnist, published
from curvlab.tasks.download import download, fetch, main
from curvlab.tasks.published import DOWNLOADS, FILES, Published

CONTENT = b"some content" * 100_000  # more than one block


def described(name, content, *urls):
    return Published(name, (f"sha256:{hashlib.sha256(content).hexdigest()}",), urls)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, counts requests, and breaks off files called ``broken``."""

    served: list[str]

    def do_GET(self):
        self.served.append(self.path)
        if self.path.endswith("broken"):
            self.send_response(200)
            self.send_header("Content-Length", "5000000")
            self.end_headers()
            self.wfile.write(CONTENT)
            return
        super().do_GET()

    def log_message(self, *_):
        """Silent."""


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")  # the user's proxy cannot reach this server
    folder = tmp_path / "served"
    folder.mkdir()
    Handler.served = []
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield folder, f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_file_with_the_right_digest_arrives_whole(server, tmp_path):
    served, address = server
    (served / "file").write_bytes(CONTENT)
    path = fetch(described("file", CONTENT, f"{address}/file"), tmp_path / "root")
    assert path.read_bytes() == CONTENT
    assert names(tmp_path / "root") == ["file"]


def test_a_file_arrives_with_the_permissions_of_the_umask(server, tmp_path):
    served, address = server
    (served / "file").write_bytes(CONTENT)
    (tmp_path / "plain").touch()
    path = fetch(described("file", CONTENT, f"{address}/file"), tmp_path / "root")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_a_corrupt_file_is_refused_and_leaves_nothing(server, tmp_path):
    served, address = server
    (served / "file").write_bytes(CONTENT[:-1] + b"X")
    file = described("file", CONTENT, f"{address}/file")
    with pytest.raises(DataError, match=r"digest sha256:\w+, expected sha256:") as caught:
        fetch(file, tmp_path / "root")
    assert f"{address}/file" in str(caught.value)
    assert file.digests[0] in str(caught.value)
    assert names(tmp_path / "root") == []


def test_a_corrupt_file_does_not_replace_what_was_there(server, tmp_path):
    served, address = server
    (served / "file").write_bytes(b"wrong")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "file").write_bytes(b"mine")
    with pytest.raises(DataError, match="Nothing was written"):
        fetch(described("file", CONTENT, f"{address}/file"), tmp_path / "root")
    assert (tmp_path / "root" / "file").read_bytes() == b"mine"
    assert names(tmp_path / "root") == ["file"]


def test_a_damaged_file_is_replaced_and_a_right_one_is_not_fetched_again(server, tmp_path):
    served, address = server
    (served / "file").write_bytes(CONTENT)
    (tmp_path / "file").write_bytes(CONTENT[:-5])
    file = described("file", CONTENT, f"{address}/file")
    assert fetch(file, tmp_path).read_bytes() == CONTENT
    assert Handler.served == ["/file"]
    fetch(file, tmp_path)
    assert Handler.served == ["/file"]


def test_a_connection_that_breaks_off_leaves_nothing(server, tmp_path):
    _, address = server
    with pytest.raises(DataError, match="broke off after 1,200,000 of 5,000,000 bytes"):
        fetch(described("broken", CONTENT, f"{address}/broken"), tmp_path / "root")
    assert names(tmp_path / "root") == []


def test_a_server_that_never_stops_is_cut_off(server, tmp_path, monkeypatch):
    served, address = server
    (served / "file").write_bytes(CONTENT)
    monkeypatch.setattr(sys.modules["curvlab.tasks.download"], "LIMIT", 1000)
    with pytest.raises(DataError, match="more than 1,000 bytes"):
        fetch(described("file", CONTENT, f"{address}/file"), tmp_path / "root")
    assert names(tmp_path / "root") == []


def test_the_second_mirror_is_used_when_the_first_fails(server, tmp_path):
    served, address = server
    (served / "good").mkdir()
    (served / "good" / "file").write_bytes(CONTENT)
    file = described("file", CONTENT, f"{address}/absent/file", f"{address}/good/file")
    assert fetch(file, tmp_path / "root").read_bytes() == CONTENT
    assert Handler.served == ["/absent/file", "/good/file"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("{address}/absent", "answered 404"),
        ("http://127.0.0.1:9/file", "could not be read"),
        ("file:///etc/hostname", "only http and https"),
        ("http://[broken/file", "could not be read"),
    ],
)
def test_an_address_that_fails_is_named_with_the_reason(server, tmp_path, url, words):
    url = url.format(address=server[1])
    with pytest.raises(DataError, match=words) as caught:
        fetch(described("file", CONTENT, url), tmp_path / "root", timeout=5)
    assert url in str(caught.value)
    assert names(tmp_path / "root") == []


def test_a_folder_that_cannot_be_written_is_a_storage_error(server, tmp_path):
    served, address = server
    (served / "file").write_bytes(CONTENT)
    (tmp_path / "root").write_text("a file, not a folder")
    with pytest.raises(StorageError, match="could not write"):
        fetch(described("file", CONTENT, f"{address}/file"), tmp_path / "root")


@pytest.fixture
def small_mnist(server, monkeypatch):
    """Four small idx files, served, with their digests in the table in place of MNIST's."""
    served, address = server
    files = []
    for file in DOWNLOADS["mnist"]:
        count = 5 if file.name.startswith("train") else 2
        shape = (count, 28, 28) if "images" in file.name else (count,)
        head = bytes([0, 0, 8, len(shape)]) + b"".join(s.to_bytes(4, "big") for s in shape)
        content = gzip.compress(head + np.ones(shape, np.uint8).tobytes())
        (served / file.name).write_bytes(content)
        files.append(described(file.name, content, f"{address}/{file.name}"))
    monkeypatch.setitem(DOWNLOADS, "mnist", tuple(files))
    for file in files:
        monkeypatch.setitem(FILES, file.name, file)
    return address


def test_what_was_downloaded_is_read_and_verified(small_mnist, tmp_path):
    paths = download("mnist", tmp_path / "root", mirror=small_mnist + "/")
    assert len(paths) == 4
    data = mnist(tmp_path / "root", verify=True)
    assert (len(data.train_labels), len(data.test_labels)) == (5, 2)


def test_the_command_downloads_and_reports(small_mnist, tmp_path, capsys):
    command = ["mnist", "--root", str(tmp_path / "root"), "--mirror", small_mnist]
    assert main(command) == 0
    assert capsys.readouterr().out.count("digest as published") == 4
    assert main([*command[:-1], f"{small_mnist}/nowhere", "--timeout", "5"]) == 0  # all there
    (tmp_path / "root" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert main([*command[:-1], f"{small_mnist}/nowhere", "--timeout", "5"]) == 1
    assert "error: could not get t10k-labels-idx1-ubyte.gz" in capsys.readouterr().err


def test_the_module_runs_as_a_command(server, tmp_path):
    _, address = server
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "curvlab.tasks.download"]
    command += ["cifar10", "--root", str(tmp_path / "root"), "--mirror", address]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 1
    assert "cifar-10-python.tar.gz answered 404" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_data_set_is_named(tmp_path):
    with pytest.raises(ValueError, match="one of mnist, cifar10, cifar100; got 'svhn'"):
        download("svhn", tmp_path)


def test_the_table_is_well_formed():
    for file in FILES.values():
        for digest in file.digests:
            algorithm, _, value = digest.partition(":")
            assert len(bytes.fromhex(value)) == hashlib.new(algorithm).digest_size
    for files in published.DOWNLOADS.values():
        assert all(url.startswith("https://") for file in files for url in file.urls)
