"""Access control of one server: API keys, limits, and what web pages of other origins may do."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import yaml
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from moestro.core.processes import network_of
from moestro.errors import ConfigError
from moestro.files.text_files import text_of
from moestro.web.errors import AuthenticationError, HttpError
from moestro.web.page import PAGE_PATHS, PROBES
from moestro.web.ports.heads import host_name
from moestro.web.ports.tls import WatchedFiles
from moestro.web.rate_limits import ProcessLimits, RequestLimits
from moestro.web.settings import AccessSettings

# Cross-Origin Resource Sharing: decides which web pages may read a response. Has no sockets, for both servers.

_METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_ALWAYS_ALLOWED = ("accept", "accept-language", "content-language", "content-type")  # Safelisted by the Fetch standard.
# Readable by pages besides the standard headers.
_EXPOSED = "X-Request-Id, Retry-After, Warning, x-moestro-engine, x-moestro-reason, endpoint-load-metrics"
_MAX_AGE_S = 600  # Time for which a browser caches a preflight.


class Cors:
    """Builds CORS headers by the rules in `settings`."""

    def __init__(self, settings: AccessSettings) -> None:
        self._origins = frozenset(settings.allowed_origins)
        self._methods = frozenset(settings.allowed_methods)
        self._headers = frozenset(name.lower() for name in settings.allowed_headers)
        self._named_headers = ", ".join(sorted({*_ALWAYS_ALLOWED, *self._headers}))
        self._has_credentials = settings.allow_credentials

    def answer_headers(self, origin: str | None) -> dict[str, str]:
        """Return the response headers for a page of `origin`; None means a request without an origin."""
        if "*" in self._origins:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED} if origin else {}
        headers = {"Vary": "Origin"}
        if origin in self._origins:
            headers |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED}
            if self._has_credentials:
                headers["Access-Control-Allow-Credentials"] = "true"
        return headers

    def answer_lines(self, origin: bytes | None) -> bytes:
        """Return `answer_headers` as header lines."""
        headers = self.answer_headers(None if origin is None else origin.decode("latin-1"))
        return _lines(headers)

    def preflight_lines(self, origin: bytes, method: bytes, headers: bytes) -> bytes:
        """Return `preflight_headers` as header lines; HttpError if the rules do not allow the request."""
        return _lines(self.preflight_headers(*(value.decode("latin-1") for value in (origin, method, headers))))

    def preflight_headers(self, origin: str, method: str, headers: str) -> dict[str, str]:
        """Return the headers that only the response to a preflight has.

        Args:
            origin: Value of `Origin`.
            method: Value of `Access-Control-Request-Method`.
            headers: Value of `Access-Control-Request-Headers`.

        Raises:
            HttpError: The rules do not allow the origin, the method or a header.
        """
        if not {origin, "*"} & self._origins:
            raise _not_allowed("origins")
        if not {method, "*"} & self._methods:
            raise _not_allowed("methods")
        allowed = self._named_headers
        if not headers.isascii():  # No name of a header, and the answer would repeat it.
            raise _not_allowed("headers")
        if "*" in self._headers:
            allowed = headers or allowed
        elif not {name.strip().lower() for name in headers.split(",") if name.strip()} <= {
            *_ALWAYS_ALLOWED,
            *self._headers,
        }:
            raise _not_allowed("headers")
        return {
            "Access-Control-Allow-Methods": _METHODS if "*" in self._methods else ", ".join(sorted(self._methods)),
            "Access-Control-Allow-Headers": allowed,
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }


def _lines(headers: dict[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")


def _not_allowed(what: str) -> HttpError:
    return HttpError(400, f"The preflight is not allowed by --allowed-{what}.", "cors_not_allowed")


# Keeps foreign web pages away from the planes of operators.


def only_programs(is_allowed: Callable[[str], bool]) -> Middleware:
    """Refuse requests of foreign web pages, even under a host name that resolves to this address (DNS rebinding).

    The plane's own page may ask. A browser names the origin of a page in every request that is not a GET, and in every
    request to another origin, so that a foreign page cannot pass for the own one.

    Args:
        is_allowed: Callable that returns whether a host name may address the plane; literal addresses always may.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        named = request.headers.get("Host", "")
        host = host_name(named)
        is_own = request.headers.get("Origin", f"http://{named}") == f"http://{named}"
        if not is_own or not (is_allowed(host) or _is_address(host)):
            raise HttpError(403, "The admin plane does not answer requests from other web pages.", "permission_denied")
        return await handler(request)

    return middleware


def _is_address(host: str) -> bool:
    return host.replace(".", "").isdigit() or ":" in host


logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # Time between two looks at the file of keys.
_MAX_FILE_BYTES = 1 << 20
_MAX_KEYS = 10_000
_TENANT = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """What one key stands for.

    Attributes:
        name: Name under which its requests count: the tenant, or a number of the key.
        tenant: Tenant of the key; empty if it has none.
        is_router: Whether it is the key of a router, which names its clients.
    """

    name: Hashable
    tenant: str = ""
    is_router: bool = False


class KeyFile:
    """A file of keys: YAML that maps keys to tenants, or a list of keys, or keys separated by spaces and lines.

    Args:
        path: The file.
        router_keys: Keys of routers, which may not be in the file.

    Raises:
        ConfigError: The file cannot be read, or is no such list. No text of the file is in the error.
    """

    def __init__(self, path: Path, router_keys: Iterable[str] = ()) -> None:
        self._path = path
        self._router_keys = frozenset(router_keys)
        self._watched = WatchedFiles([path])
        self._fault = ""
        self.keys: Mapping[str, str] = self._read()

    def renew(self) -> bool:
        """Read the file again if it has changed, and return whether there are new keys.

        A file that cannot be used leaves the old keys in place, and is logged once.
        """
        if not self._watched.are_to_be_read():
            return False
        try:
            keys = self._read()
        except ConfigError as error:
            if str(error) != self._fault:
                self._fault = str(error)
                logger.warning("the API keys stay as they are: %s", error)
            return False
        self._fault = ""
        if keys == self.keys:
            return False
        logger.info("--api-key-file %s: %d keys are valid now (%d before)", self._path, len(keys), len(self.keys))
        self.keys = keys
        return True

    def _read(self) -> dict[str, str]:
        """Return the tenant of each key; empty for a key without one."""
        try:
            with self._path.open("rb") as file:
                text = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"--api-key-file {self._path}: {error.strerror or error}") from None
        if len(text) > _MAX_FILE_BYTES:
            raise ConfigError(f"--api-key-file {self._path} has more than {_MAX_FILE_BYTES} bytes")
        keys: dict[str, str] = {}
        for line, key, tenant in self._entries(text):
            place = f"--api-key-file {self._path}, line {line}"
            if not _KEY.fullmatch(key):
                raise ConfigError(f"{place}: a key has printable ASCII without spaces, 512 characters at most")
            if tenant and not _TENANT.fullmatch(tenant):
                raise ConfigError(f"{place}: a tenant has letters, digits and . _ @ - in it, 64 at most")
            if keys.setdefault(key, tenant) != tenant:
                raise ConfigError(f"{place}: the key stands for two tenants")
        if not keys:
            raise ConfigError(f"--api-key-file {self._path} has no key: write KEY: TENANT, or a key, on each line")
        if len(keys) > _MAX_KEYS:
            raise ConfigError(f"--api-key-file {self._path} has {len(keys)} keys, and {_MAX_KEYS} is the most")
        if not self._router_keys.isdisjoint(keys):
            raise ConfigError(
                f"--api-key-file {self._path} and --router-api-key have a key in common: a client with a router's key"
                " could take any name, so give routers keys of their own"
            )
        return keys

    def _entries(self, text: bytes) -> Iterator[tuple[int, str, str]]:
        """Yield line, key and tenant of each entry. Numbers are texts, because a key may be all digits."""
        try:
            root = yaml.compose(text_of(text), yaml.SafeLoader)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            line = f", line {mark.line + 1}" if mark is not None else ""
            # The error's own text may quote a key.
            raise ConfigError(
                f"--api-key-file {self._path}{line} is not YAML: write KEY: TENANT on each line"
            ) from None
        if isinstance(root, yaml.MappingNode):
            for key, tenant in root.value:
                yield key.start_mark.line + 1, self._scalar(key), self._scalar(tenant)
        elif isinstance(root, yaml.SequenceNode):
            for key in root.value:
                yield key.start_mark.line + 1, self._scalar(key), ""
        elif isinstance(root, yaml.ScalarNode):
            for key in self._scalar(root).split():
                yield root.start_mark.line + 1, key, ""

    def _scalar(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            line = node.start_mark.line + 1
            raise ConfigError(f"--api-key-file {self._path}, line {line}: write KEY: TENANT, or - KEY, on each line")
        return "" if node.tag == "tag:yaml.org,2002:null" else str(node.value)


class ApiKeys:
    """API keys of a server; falsy if there are none and no key is needed.

    A key is looked up by a digest under a secret. So the time of a lookup reveals nothing about keys.

    Args:
        keys: Keys of clients.
        router_keys: Keys of routers.
        file: Further keys of clients; None means none.
        secret: Secret of the processes that must give a key without a tenant one name. None: one of this process, whose
            keys are numbered.
    """

    def __init__(
        self,
        keys: Iterable[str],
        router_keys: Iterable[str] = (),
        file: KeyFile | None = None,
        now_s: Callable[[], float] = time.monotonic,
        secret: bytes | None = None,
    ) -> None:
        self._is_shared = secret is not None
        self._secret = secret or secrets.token_bytes(32)
        self._now_s = now_s
        self._file = file
        self._numbers = count()
        digests = [self._digest(_bytes(key)) for key in keys]
        self._own = {digest: KeyHolder(self._number(digest)) for digest in digests}
        self._routers = {
            self._digest(_bytes(key)): KeyHolder(f"router {number}", is_router=True)
            for number, key in enumerate(router_keys)
        }
        self._of_file: dict[bytes, KeyHolder] = {}
        self._look_s = now_s() + _LOOK_S
        if file is not None:
            self._take(file.keys)

    def __bool__(self) -> bool:
        return bool(self._own or self._routers or self._file is not None)

    @property
    def num_clients(self) -> int:
        """Number of keys of clients."""
        return len(self._own) + len(self._of_file)

    @property
    def tell_clients_apart(self) -> bool:
        """Whether the key of a request may say more of its client than its address does."""
        return self._file is not None or bool(self._routers) or len(self._own) > 1

    @property
    def may_change(self) -> bool:
        """Whether keys come and go, and may have tenants."""
        return self._file is not None

    def find(self, authorization: str | bytes, x_api_key: str | bytes) -> KeyHolder | None:
        """Return what a request's key stands for; None means no valid key, or two different ones.

        Args:
            authorization: Value of `Authorization`, a bearer token as OpenAI's clients send it; empty if absent.
            x_api_key: Value of `x-api-key`, a key as Anthropic's clients send it; empty if absent.
        """
        if self._file is not None and self._now_s() >= self._look_s:
            self._look(self._file)
        bearer, other = _bytes(authorization), _bytes(x_api_key)
        found = set()
        if bearer:
            scheme, _, token = bearer.partition(b" ")
            found.add(self._digest(token.strip()) if scheme.lower() == b"bearer" else b"")
        if other:
            found.add(self._digest(other.strip()))
        if len(found) != 1:
            return None
        digest = found.pop()
        return self._routers.get(digest) or self._of_file.get(digest) or self._own.get(digest)

    def _look(self, file: KeyFile) -> None:
        self._look_s = self._now_s() + _LOOK_S
        if file.renew():
            self._take(file.keys)

    def _take(self, keys: Mapping[str, str]) -> None:
        """Replace the keys of the file. A key that stays keeps its number."""
        before, self._of_file = self._of_file, {}
        for key, tenant in keys.items():
            digest = self._digest(_bytes(key))
            holder = KeyHolder(tenant, tenant) if tenant else before.get(digest)
            if holder is None or holder.tenant != tenant:
                holder = KeyHolder(self._number(digest))
            self._of_file[digest] = holder

    def _number(self, digest: bytes) -> int:
        """Return the number of a new key."""
        return int.from_bytes(digest[:8]) if self._is_shared else next(self._numbers)

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=16, key=self._secret).digest()


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value


# Requested by the operator's machines, and by the page at `/`, once a second.
UNLIMITED = PROBES | PAGE_PATHS | {"/metrics", "/statistics"}
NO_LIMITS = AccessSettings()
# By it a router names its client to a server that has the router's key. A router passes no client's own value on.
CLIENT_HEADER = "X-Moestro-Client"
_CLIENT_NAME = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Access:
    """Checks that precede the handling of a request.

    Attributes:
        keys: API keys; falsy means that no key is needed.
        limits: Request limits for each key and address.
        cors: CORS rules; None means no CORS headers.
    """

    keys: ApiKeys
    limits: RequestLimits
    cors: Cors | None

    @classmethod
    def of(
        cls,
        api_keys: Iterable[str],
        settings: AccessSettings = NO_LIMITS,
        router_keys: Sequence[str] = (),
        shared: ProcessLimits | None = None,
    ) -> Access:
        """Return the checks that a server's settings ask for.

        Args:
            api_keys: Accepted keys of clients, beside those of the settings' file.
            router_keys: Accepted keys of routers, whose requests name their client.
            shared: Table of the processes that share the limits; None means that there is one process.

        Raises:
            ConfigError: There are limits for each key, but no keys, or the file of keys cannot be used.
        """
        file = None if settings.api_key_file is None else KeyFile(settings.api_key_file, router_keys)
        keys = ApiKeys(api_keys, router_keys, file, secret=None if shared is None else shared.table.secret)
        if not keys and (settings.max_requests_per_minute_per_key or settings.max_concurrent_requests_per_key):
            raise ConfigError("limits for each key need keys: give --api-key or --api-key-file, or limit each address")
        cors = Cors(settings) if settings.allowed_origins else None
        return cls(keys, RequestLimits(settings, shared), cors)

    def key_of(self, authorization: str | bytes, x_api_key: str | bytes) -> Hashable | None:
        """Return the name of a request's key, from the values of two headers; None means that no key is needed.

        Keys of one tenant have one name.

        Raises:
            AuthenticationError: The request has no valid key, or two different ones.
        """
        if not self.keys:
            return None
        holder = self.keys.find(authorization, x_api_key)
        if holder is None:
            raise AuthenticationError
        return holder.name

    def client_of(self, authorization: str | bytes, x_api_key: str | bytes, address: str, named: str = "") -> Hashable:
        """Return the name under which a client's failures, retries and bodies count together.

        It is the tenant of the key, or the key where several keys tell clients apart, otherwise the network. A key that
        this server does not check would let one client be many. Behind a router with a router's key, it is the router's
        name of the client.

        Args:
            named: Value of `CLIENT_HEADER`, which counts only beside a router's key; empty if absent.
        """
        if not self.keys.tell_clients_apart:
            return network_of(address)
        holder = self.keys.find(authorization, x_api_key)
        if holder is None:
            return network_of(address)
        if holder.is_router:
            return named if _CLIENT_NAME.fullmatch(named) else holder.name
        return holder.name if holder.tenant or self.keys.num_clients > 1 else network_of(address)

    def tenant_of(self, authorization: str | bytes, x_api_key: str | bytes) -> str | None:
        """Return the tenant of a request's key; None if it has none."""
        if not self.keys.may_change:
            return None
        holder = self.keys.find(authorization, x_api_key)
        return holder.tenant or None if holder is not None else None
