"""Access to a protected etcd: users with passwords, certificates, and the parameters of its URL."""

from __future__ import annotations

import base64
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from etcd_server import EtcdServer
from holdfast.control.store.etcd import EtcdStore
from holdfast.control.store.etcd_place import EtcdPlace, place_at
from holdfast.control.store.interface import Entry, StoreAwayError
from holdfast.control.store.store_choice import check_store, open_store
from holdfast.errors import BadInputError

#: lifetime of an idle session, in seconds
TTL_S = 1


class Guarded:
    """An etcd with a user `hold`, which may read and write below `holdfast/`, and the administrator root."""

    def __init__(self, folder: Path) -> None:
        self.server = EtcdServer(folder / "etcd", ("--auth-token-ttl", str(TTL_S)))
        self.file = folder / "password"
        self.file.write_text("open sesame\n")
        self.url = f"{self.server.url}?user=hold&password_file={self.file}"
        self._root = ""
        self.ask("auth/user/add", name="root", password="r")
        self.ask("auth/user/grant", user="root", role="root")
        self.ask("auth/user/add", name="hold", password="open sesame")
        self.ask("auth/role/add", name="holder")
        self.permit("holdfast/")
        self.ask("auth/user/grant", user="hold", role="holder")
        self.ask("auth/enable")

    def permit(self, prefix: str) -> None:
        """Grant the user read and write permission below a prefix."""
        end = f"{prefix[:-1]}{chr(ord(prefix[-1]) + 1)}"
        key, range_end = (base64.b64encode(text.encode()).decode() for text in (prefix, end))
        perm = {"permType": "READWRITE", "key": key, "range_end": range_end}
        self.ask("auth/role/grant", name="holder", perm=perm)

    def as_root(self, path: str, **body: object) -> None:
        """Authenticate as root, then send an administrative request."""
        who = {"name": "root", "password": "r"}
        answer = httpx.post(f"{self.server.address}/v3/auth/authenticate", json=who, trust_env=False)
        self._root = answer.json()["token"]
        self.ask(path, **body)

    def ask(self, path: str, **body: object) -> None:
        """Send an administrative request, which must succeed."""
        headers = {"Authorization": self._root} if self._root else {}
        answer = httpx.post(f"{self.server.address}/v3/{path}", json=body, headers=headers, trust_env=False)
        assert answer.is_success, answer.text


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path)
    yield guarded
    guarded.server.kill()


def test_a_user_logs_in_again_after_a_restart_or_a_changed_password(guarded: Guarded) -> None:
    with contextlib.closing(EtcdStore(guarded.url, answer_s=5.0)) as store:
        assert store.compare_and_swap("a", b"1", 0) is not None
        first = store.get("a")
        assert first is not None

        guarded.server.kill()
        with pytest.raises(StoreAwayError):
            store.compare_and_swap("a", b"2", first.revision)
        guarded.server.start()  # the new process has no sessions
        second = store.compare_and_swap("a", b"2", first.revision)
        assert second is not None
        assert store.get("a") == Entry(b"2", second)

        # The password of the user changes, and the file has the new one.
        guarded.as_root("auth/user/changepw", name="hold", password="new")
        guarded.file.write_text("new")
        assert store.get("a") == Entry(b"2", second)
        with contextlib.closing(store.watch("a", second)) as watch:
            assert store.compare_and_swap("a", b"3", second) is not None
            assert watch.next(30.0)["a"].value == b"3"
        guarded.file.write_text("old")
        guarded.as_root("auth/user/changepw", name="hold", password="newer")
        with pytest.raises(StoreAwayError, match=r"user hold, with the password in"):
            store.get("a")  # an outage, because the user had access before and may get it again
        guarded.file.unlink()
        with pytest.raises(StoreAwayError, match=r"No such file"):
            store.get("a")
        guarded.file.write_text("newer")
        assert store.get("a") is not None, "the file has the right password again"


def test_an_error_of_a_refused_login_contains_the_remedy(guarded: Guarded) -> None:
    def refused(url: str) -> str:
        with pytest.raises(BadInputError) as caught:
            open_store(url)
        assert "sesame" not in str(caught.value)
        return str(caught.value)

    assert "user name is empty; give ?user=NAME&password_file=FILE" in refused(guarded.server.url)
    assert "grant a role of user hold to read and write the prefix team/" in refused(
        guarded.url.replace("?", "/team?", 1)
    )
    whose = f"(user hold, with the password in {guarded.file})"
    guarded.file.write_text("wrong\n")
    assert f"invalid user ID or password {whose}" in refused(guarded.url)
    guarded.file.write_bytes(b"x" * 5000)
    assert f"it holds 4097 characters, and 1 to 4096 are a password {whose}" in refused(guarded.url)
    guarded.file.write_bytes(b"\xff")
    assert f"invalid start byte {whose}" in refused(guarded.url)
    guarded.file.unlink()
    assert f"No such file or directory {whose}" in refused(guarded.url)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the certificate of an authority (`ca`), two that it signed, and an unrelated `other`."""
    folder = tmp_path_factory.mktemp("certificates")
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def run(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True, timeout=60)

    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        run("req", "-x509", *ec, "-days", "3", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "3", "-extfile", "names")
    for name in ("server", "client"):
        run("req", *ec, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        run("x509", "-req", "-in", f"{name}.csr", *by, "-out", f"{name}.pem")
    run("pkey", "-in", "client.key", "-aes256", "-passout", "pass:x", "-out", "locked.key")
    return folder


@pytest.fixture(scope="module")
def encrypted(signed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd that accepts only clients with a certificate of the authority."""
    trust = ssl.create_default_context(cafile=str(signed / "ca.pem"))
    trust.load_cert_chain(signed / "client.pem", signed / "client.key")
    shown = ("--cert-file", str(signed / "server.pem"), "--key-file", str(signed / "server.key"))
    wanted = ("--client-cert-auth", "--trusted-ca-file", str(signed / "ca.pem"))
    server = EtcdServer(tmp_path_factory.mktemp("encrypted") / "etcd", (*shown, *wanted), trust)
    yield server
    server.kill()


def test_a_client_with_a_signed_certificate_is_accepted(signed: Path, encrypted: EtcdServer) -> None:
    ca, shown = f"?ca={signed / 'ca.pem'}", f"&cert={signed / 'client.pem'}&key={signed / 'client.key'}"
    with contextlib.closing(open_store(f"{encrypted.url}{ca}{shown}")) as store:
        revision = store.compare_and_swap("a", b"1", 0)
        assert revision is not None
        assert store.get("a") == Entry(b"1", revision)
    both = signed / "both.pem"
    both.write_bytes((signed / "client.pem").read_bytes() + (signed / "client.key").read_bytes())
    with contextlib.closing(open_store(f"{encrypted.url}{ca}&cert={both}")) as store:
        assert store.get("a") == Entry(b"1", revision)


@pytest.mark.parametrize("wrong", ["none", "another's", "another authority"])
def test_a_missing_or_foreign_certificate_or_authority_is_refused(
    signed: Path, encrypted: EtcdServer, wrong: str
) -> None:
    other = f"&cert={signed / 'other.pem'}&key={signed / 'other.key'}" if wrong == "another's" else ""
    ca = signed / ("other.pem" if wrong == "another authority" else "ca.pem")
    with pytest.raises(StoreAwayError, match=r"etcd does not answer: https:.*(?i:ssl|certificate)"):
        open_store(f"{encrypted.url}?ca={ca}{other}")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ca=missing.pem", r"the certificate missing\.pem cannot be used"),
        ("cert=missing.pem&key=client.key", r"missing\.pem cannot be shown with the key client\.key"),
        ("cert=client.pem", r"client\.pem cannot be shown"),
        ("cert=client.pem&key=other.key", r"client\.pem cannot be shown with the key other\.key"),
        ("cert=client.pem&key=locked.key", r"the key without a passphrase"),
    ],
)
def test_an_unusable_certificate_or_key_file_is_refused(
    signed: Path, given: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(signed)
    with pytest.raises(BadInputError, match=said):
        open_store(f"etcd:https://127.0.0.1:9?{given}")


def test_an_etcd_url_is_parsed() -> None:
    assert place_at("etcd:http://h:1") == EtcdPlace(("http://h:1",))
    assert place_at("etcd:https://h:1,https://[::1]:2/a/b/?ca=x.pem&cert=c&key=k&user=a%26b&password_file=/p") == (
        EtcdPlace(("https://h:1", "https://[::1]:2"), "a/b", "x.pem", "c", "k", "a&b", "/p")
    )


@pytest.mark.parametrize(
    "url",
    [
        "etcd:h:1",
        "etcd:ftp://h:1",
        "etcd:http://h",
        "etcd:http://:1",
        "etcd:http://h:x",
        "etcd:http://h:1,",
        "etcd:http://h:1/p,http://g:1",
        "etcd:http://h:1?key=x",
        "etcd:http://u:secret@h:1",
        "etcd:http://h:1?user=u&password=secret",
        "etcd:http://h:1?user=u",
        "etcd:http://h:1?password_file=f",
        "etcd:http://h:1?user=&password_file=f",
        "etcd:http://h:1?cert=c&key=k",
        "etcd:https://h:1,http://g:1?cert=c",
        "etcd:https://h:1?cert=c&cert=d",
        "etcd:https://h:1?certificate=c",
    ],
)
def test_an_invalid_etcd_url_is_refused_without_printing_the_password(url: str) -> None:
    with pytest.raises(BadInputError, match="store") as caught:
        check_store(url)
    assert "secret" not in str(caught.value)
