"""Address and credentials of an etcd, from the URL of a store and the files that it names."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, urlsplit

from holdfast.errors import BadInputError

#: keys begin with this where the URL names nothing else
PREFIX = "holdfast"
#: bytes of a password's file that are read
_MOST_PASSWORD = 4096
_KEYS = ("ca", "cert", "key", "user", "password_file")
_FORM = "etcd:http://HOST:PORT[,http://HOST:PORT ..][/PREFIX][?KEY=VALUE[&KEY=VALUE ..]]"


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """The address of an etcd, our credentials, and the prefix of our keys."""

    endpoints: tuple[str, ...]
    prefix: str = PREFIX
    #: file of the authority for its certificates
    ca: str = ""
    #: file of our certificate
    cert: str = ""
    #: file of our certificate's key
    key: str = ""
    #: user of etcd, or ""
    user: str = ""
    #: file with the user's password
    password_file: str = ""

    def password(self) -> str:
        """Read the user's password. Each time again, because it may have changed.

        Raises:
            OSError: it cannot be read.
            ValueError: the file does not contain a password.
        """
        with Path(self.password_file).open("rb") as file:
            text = file.read(_MOST_PASSWORD + 1).decode().rstrip("\r\n")
        if not text or len(text) > _MOST_PASSWORD:
            raise ValueError(f"it holds {len(text)} characters, and 1 to {_MOST_PASSWORD} are a password")
        return text

    def trust(self) -> ssl.SSLContext:
        """Return the TLS context, with trusted authorities and our certificate.

        Raises:
            BadInputError: a certificate, or its key, cannot be used.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except (OSError, ssl.SSLError) as error:
            raise BadInputError(f"the certificate {self.ca} cannot be used: {error}") from None
        if self.cert:
            try:
                # A key with a passphrase would wait for a terminal that a server does not have.
                context.load_cert_chain(self.cert, self.key or None, password=lambda: "")
            except (OSError, ssl.SSLError) as error:
                with_key = f" with the key {self.key}" if self.key else ""
                raise BadInputError(
                    f"the certificate {self.cert} cannot be shown{with_key}: {error}; both must be PEM, the key "
                    "without a passphrase"
                ) from None
        return context


def place_at(url: str) -> EtcdPlace:
    """Parse the address of an etcd: `etcd:http://HOST:PORT[,http://HOST:PORT ..][/PREFIX][?KEY=VALUE[&KEY=VALUE ..]]`.

    Raises:
        BadInputError: the text is malformed; the message names the fault.
    """
    kind, _, rest = url.partition(":")
    try:
        parts = [urlsplit(part) for part in rest.split(",")]
        ports = [part.port for part in parts]
    except ValueError as error:
        raise BadInputError(f"the store is {url!r}: {error}") from None
    if any(part.username is not None for part in parts):
        raise BadInputError(
            "a store of etcd is opened without a password in its URL, which others can see: give "
            "?user=NAME&password_file=FILE"
        )
    wrong = f"the store is {url!r}: it must be `{_FORM}`"
    if kind != "etcd" or any(part.scheme not in ("http", "https") or not part.hostname for part in parts):
        raise BadInputError(wrong)
    if None in ports or any(part.fragment for part in parts):
        raise BadInputError(wrong)
    if any(part.path or part.query for part in parts[:-1]):
        raise BadInputError(f"{wrong}; the prefix and keys come after the last of them")
    last = parts[-1]
    endpoints = tuple(f"{part.scheme}://{part.netloc}" for part in parts)
    return EtcdPlace(endpoints, last.path.strip("/") or PREFIX, **_read_options(url, parts))


def _read_options(url: str, parts: list[SplitResult]) -> dict[str, str]:
    """Return the options in the query of a store's URL.

    Args:
        url: for the errors.
        parts: the parsed endpoints; the last one contains the query.

    Raises:
        BadInputError: an option is unknown, empty, repeated, without the option that it needs, or contains a password;
            or there is a client certificate, and an endpoint without https.
    """
    query = parse_qs(parts[-1].query, keep_blank_values=True)
    for key, values in query.items():
        if key == "password":
            raise BadInputError("a store's URL holds no password, which others can see: give password_file=FILE")
        if key not in _KEYS or len(values) > 1 or not values[0]:
            raise BadInputError(
                f"the store is {url!r}: {key!r} is none of {', '.join(_KEYS)}, given once, with a value"
            )
    for option, other in (("key", "cert"), ("user", "password_file"), ("password_file", "user")):
        if option in query and other not in query:
            raise BadInputError(f"the store is {url!r}: {option} has no effect without {other}; give both")
    if "cert" in query and any(part.scheme != "https" for part in parts):
        raise BadInputError(
            f"the store is {url!r}: cert is shown over https: only; give https: everywhere, or leave it"
        )
    return {key: values[0] for key, values in query.items()}
