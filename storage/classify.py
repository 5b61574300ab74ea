"""What a failure of a store means: the tables that tell transient from permanent, and nothing else.

Libraries wrap one another's exceptions (s3fs turns a botocore ClientError into a PermissionError), so the whole chain
of causes is asked, in this order: the service's error code, the HTTP status, the exception's type, its errno.
The first table that knows the failure decides; what no table knows is permanent, because a retry needs a reason.
"""

import errno
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from enum import Enum
from http import HTTPStatus
from typing import Any, NamedTuple

from everplex.storage.errors import (
    ExpiredCredentialsError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
)

__all__ = ["BY_CODE", "BY_ERRNO", "BY_STATUS", "BY_TYPE", "Meaning", "Verdict", "classify", "store_error"]


class Verdict(Enum):
    """What to do about a failure; the value is the error that says so."""

    TRANSIENT = StoreUnavailableError
    EXPIRED = ExpiredCredentialsError
    REFUSED = StoreRefusedError
    MISSING = ObjectNotFoundError
    EXISTS = ObjectExistsError


class Meaning(NamedTuple):
    """One row of a table."""

    verdict: Verdict
    hint: str = ""


_AGAIN = Meaning(Verdict.TRANSIENT)
_RENEW = Meaning(Verdict.EXPIRED, "give it fresh credentials and run the same command again")
_MISSING = Meaning(Verdict.MISSING)
_EXISTS = Meaning(Verdict.EXISTS, "an object of that name is already there")
_FORBIDDEN = Meaning(
    Verdict.REFUSED,
    "check the credentials and their policy; a worker that may read only some groups names them with --groups",
)
_CREDENTIALS = Meaning(Verdict.REFUSED, "check the access key, the secret and which service they are for")
_BUCKET = Meaning(Verdict.REFUSED, "check the bucket's name and region; everplex never makes a bucket")
_CLOCK = Meaning(Verdict.REFUSED, "set this machine's clock (chronyc tracking, timedatectl) and run the command again")
_REQUEST = Meaning(Verdict.REFUSED, "check the URL, the endpoint and the --store-option values")
_MODE = Meaning(Verdict.REFUSED, "choose a place that may be written, or mend its permissions")

BY_CODE: dict[str, Meaning] = {
    # S3 and what imitates it
    "SlowDown": _AGAIN,
    "RequestTimeout": _AGAIN,
    "InternalError": _AGAIN,
    "ServiceUnavailable": _AGAIN,
    "Throttling": _AGAIN,
    "ThrottlingException": _AGAIN,
    "RequestLimitExceeded": _AGAIN,
    "ConditionalRequestConflict": _AGAIN,
    "OperationAborted": _AGAIN,
    "BadDigest": _AGAIN,  # the body was damaged on its way: the same bytes may arrive whole
    "IncompleteBody": _AGAIN,
    "XAmzContentSHA256Mismatch": _AGAIN,
    "ExpiredToken": _RENEW,
    "ExpiredTokenException": _RENEW,
    "TokenRefreshRequired": _RENEW,
    "RequestTimeTooSkewed": _CLOCK,
    "NoSuchKey": _MISSING,
    "PreconditionFailed": _EXISTS,
    "NoSuchBucket": _BUCKET,
    "PermanentRedirect": _BUCKET,
    "AuthorizationHeaderMalformed": _BUCKET,
    "AccessDenied": _FORBIDDEN,
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    # Azure
    "ServerBusy": _AGAIN,
    "OperationTimedOut": _AGAIN,
    "BlobNotFound": _MISSING,
    "BlobAlreadyExists": _EXISTS,
    "ContainerNotFound": _BUCKET,
    "AuthorizationFailure": _FORBIDDEN,
    "AuthorizationPermissionMismatch": _FORBIDDEN,
    "AuthenticationFailed": _CREDENTIALS,
    "ExpiredAuthenticationToken": _RENEW,
}

BY_STATUS: dict[int, Meaning] = {
    HTTPStatus.BAD_REQUEST: _REQUEST,
    HTTPStatus.UNAUTHORIZED: _CREDENTIALS,
    HTTPStatus.FORBIDDEN: _FORBIDDEN,
    HTTPStatus.NOT_FOUND: _MISSING,
    HTTPStatus.REQUEST_TIMEOUT: _AGAIN,
    HTTPStatus.CONFLICT: _AGAIN,
    HTTPStatus.PRECONDITION_FAILED: _EXISTS,
    HTTPStatus.TOO_MANY_REQUESTS: _AGAIN,
    HTTPStatus.INTERNAL_SERVER_ERROR: _AGAIN,
    HTTPStatus.BAD_GATEWAY: _AGAIN,
    HTTPStatus.SERVICE_UNAVAILABLE: _AGAIN,
    HTTPStatus.GATEWAY_TIMEOUT: _AGAIN,
}

BY_TYPE: dict[str, Meaning] = {
    # by name, over the whole inheritance: the libraries need not be installed
    "NoCredentialsError": _CREDENTIALS,
    "PartialCredentialsError": _CREDENTIALS,
    "TokenRetrievalError": _RENEW,
    "ParamValidationError": _REQUEST,
    "HTTPClientError": _AGAIN,  # botocore: connections and time-outs
    "ConnectionError": _AGAIN,  # the builtin one and everyone's own
    "ClientConnectionError": _AGAIN,  # aiohttp
    "ClientPayloadError": _AGAIN,
    "BadHttpMessage": _AGAIN,
    "ServiceRequestError": _AGAIN,  # azure
    "ServiceResponseError": _AGAIN,
    "IncompleteReadError": _AGAIN,
    "ResponseStreamingError": _AGAIN,
    "ResponseParserError": _AGAIN,
    "TimeoutError": _AGAIN,
    "FileNotFoundError": _MISSING,
    "FileExistsError": _EXISTS,
    "PermissionError": _FORBIDDEN,
}

BY_ERRNO: dict[int, Meaning] = {
    errno.ENOSPC: Meaning(Verdict.REFUSED, "free some space, or use another OUT, and run the same command again"),
    errno.EDQUOT: Meaning(Verdict.REFUSED, "free some of your quota, or use another OUT, and run the command again"),
    errno.EROFS: _MODE,
    errno.EACCES: _MODE,
    errno.EPERM: _MODE,
    errno.ENOTDIR: Meaning(Verdict.REFUSED, "a file stands where a folder is needed: move it, or use another OUT"),
    errno.EISDIR: Meaning(Verdict.REFUSED, "a folder stands where a file is needed: move it, or use another OUT"),
    errno.ENAMETOOLONG: Meaning(Verdict.REFUSED, "use a shorter OUT"),
    errno.EFBIG: Meaning(Verdict.REFUSED, "raise the file size limit (ulimit -f)"),
    errno.EMFILE: Meaning(Verdict.TRANSIENT, "raise the limit of open files (ulimit -n) if this lasts"),
    errno.ENFILE: Meaning(Verdict.TRANSIENT, "the whole system has too many open files"),
    errno.ESTALE: _AGAIN,
    errno.EIO: _AGAIN,
    errno.EBUSY: _AGAIN,
    errno.EAGAIN: _AGAIN,
    errno.ETIMEDOUT: _AGAIN,
    errno.ENETUNREACH: _AGAIN,
    errno.EHOSTUNREACH: _AGAIN,
}


def classify(error: BaseException) -> Meaning:
    """Return what `error`, or the first cause of it that a table knows, means."""
    chain = list(_chain(error))
    for table in (_by_code, _by_status, _by_system_errno, _by_type, _by_errno):
        for cause in chain:
            if meaning := table(cause):
                return meaning
    return Meaning(Verdict.REFUSED)


def store_error(error: BaseException, operation: str, location: str) -> StoreError:
    """Return the StoreError that says which `operation` on which `location` failed, why, and what to do."""
    meaning = classify(error)
    reason = _reason(error)
    if meaning is _CLOCK:
        reason = f"this machine's clock and the store's differ too much{_clock_difference(error)}"
    made: StoreError = meaning.verdict.value(operation, location, reason, meaning.hint)
    return made


def _by_code(error: BaseException) -> Meaning | None:
    return BY_CODE.get(_code(error))


def _by_status(error: BaseException) -> Meaning | None:
    # A damaged HTTP answer (aiohttp: 400) is no answer of the service's: its type says more.
    return None if _by_type(error) else BY_STATUS.get(_status(error))


def _by_system_errno(error: BaseException) -> Meaning | None:
    """Errno of an error that the system raised about a file: exact, where PermissionError hides which one it was."""
    return _by_errno(error) if isinstance(error, OSError) and error.filename is not None else None


def _by_type(error: BaseException) -> Meaning | None:
    return next((BY_TYPE[base.__name__] for base in type(error).__mro__ if base.__name__ in BY_TYPE), None)


def _by_errno(error: BaseException) -> Meaning | None:
    return BY_ERRNO.get(error.errno) if isinstance(error, OSError) and error.errno is not None else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _response(error: BaseException) -> dict[str, Any]:
    response = getattr(error, "response", None)
    return response if isinstance(response, dict) else {}


def _code(error: BaseException) -> str:
    code = _response(error).get("Error", {}).get("Code") or getattr(error, "error_code", "")
    return str(code)


def _status(error: BaseException) -> int:
    """HTTP status as botocore, azure (`status_code`), aiohttp (`status`) or gcsfs (`code`) tells it; 0 if none."""
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    for found in (status, *(getattr(error, name, None) for name in ("status_code", "status", "code"))):
        if isinstance(found, int) or (isinstance(found, str) and found.isdigit()):
            return int(found)
    code = _code(error)  # a HEAD has no body: botocore then gives the status as the code
    return int(code) if code.isdigit() else 0


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    text = " ".join(str(error).split())
    if isinstance(error, TimeoutError):
        return text or "no answer in time"
    return text or type(error).__name__


def _clock_difference(error: BaseException) -> str:
    for cause in _chain(error):
        headers = _response(cause).get("ResponseMetadata", {}).get("HTTPHeaders", {})
        if "date" in headers:
            return f" (the store says it is {parsedate_to_datetime(headers['date']).isoformat()})"
    return ""
