"""Texts without passwords, tokens and other secrets, for records and pages that others may read.

A secret is known by its name, by the form in which it stands (in a URL, an option, a header, or behind ``name=`` or
``name:``), or by the form that a service gives to its tokens. A secret in another form is not found.
"""

from __future__ import annotations

import re

__all__ = ["HIDDEN", "hides", "hides_number", "is_secret", "without_password", "without_secrets"]

HIDDEN = "…"
"""Text in a secret's place."""

_SERVICES = "aws|s3|gcs|gcp|azure|wandb|github|gitlab|subscription|licen[cs]e"
_SECRET = re.compile(
    r"(?:^|_)(?:[a-z]*tokens?\d*|[a-z]*secrets?|pass|userpass|pw|pwd|cred(?:ential)?s?|auth|authorization|bearer|cookies?)(?:_|$)"
    r"|pass(?:word|wd|phrase|code)|dbpass|connection_?string"
    r"|(?:^|_|[a-z])(?:api|access|account|private|secret|signing|encryption|storage|hf|ssh|openai|anthropic)_?keys?(?:_|$)"
    rf"|(?:^|_)(?:{_SERVICES})_(?:key|pat)(?:_|$)"
    r"|(?:^|_)(?:jwt|otp|sas)(?:_|$)"
)
_SECRET_NUMBER = re.compile(r"pass(?:word|wd|phrase|code)|(?:^|_)(?:pass|pw|pwd|pin|otp)(?:_|$)")
_MANY = re.compile(r"tokens(?:_|$)")  # their number is no secret, however large
_LONG_NUMBER = 6  # digits
_IN_A_URL = re.compile(
    r"(?i)([?&;#](?:[\w-]*(?:password|passwd|passphrase|pwd|token|secret|signature|credential|key)|sig)=)[^&;\s'\"]*"
)
_OPTION = re.compile(r"(?:^|(?<=\s))--?[\w-]{1,200}(?:=|\s+)")
_OPTIONS_VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|[^\s'\",;&<>-][^\s'\",;&<>]*")
_ASSIGNED = re.compile(r"\b(?!(?i:authorization)\b)[A-Za-z][\w.-]{0,200}['\"]?\s*(?:=|:(?!//))\s*")
_REST = r"(?:[,&][^\s'\",;&<>=:]+(?![^\s,;&]*[=:]))*"  # of a value with commas; another name may follow one
_ASSIGNED_VALUE = re.compile(rf"'[^']*'|\"[^\"]*\"|[^\s'\",;&][^\s'\",;&>]*{_REST}")
_IN_A_HEADER = re.compile(
    r"(?i)(\bauthorization\s*[:=]\s*(?:\w+\s+)?|\bbearer\s+(?=[\w.~+/=-]{8})|\bbasic\s+(?=[a-z0-9+/]*[\d=])(?=[\w+/=]{8}))"
    r"[^\s'\"]+"
)
_USER_OPTION = re.compile(r"(?P<name>(?:^|(?<=\s))(?:-u|--user|--proxy-user)[=\s]\s*)[^\s:'\"]+:[^\s'\"]+")  # of curl
_OF_A_SERVICE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|xox[abeoprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|dapi[0-9a-f]{32}(?:-\d)?|AIza[\w-]{35}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?!-----END).)*(?:-----END [A-Z ]*PRIVATE KEY-----)?",
    re.DOTALL,
)
_COOKIES = re.compile(r"(?i)(\bcookie\s*:\s*)[^\r\n'\"]+")
_PASSWORD_WITH_SLASH = re.compile(r"(?<=:)//[^\s/@:]+:[^\s@]*@")
_OF_ORACLE = re.compile(r"(?i)(?<=\bjdbc:oracle:)(\w+:)[^\s@]+@")


def is_secret(name: str) -> bool:
    """Return whether a name is that of a secret.

    Examples
    --------
    >>> [is_secret(name) for name in ("api_key", "accessKey", "HF_TOKEN", "db pass", "key", "sort_key", "tokenizer")]
    [True, True, True, True, False, False, False]
    """
    return bool(_SECRET.search(_words(name)))


def hides(name: str, text: str) -> bool:
    """Return whether a text of this name is a secret; a short number, as in ``--max-token 100``, rarely is.

    Examples
    --------
    >>> hides("--token", "d34d"), hides("--max-tokens", "100"), hides("pin", "1234")
    (True, False, True)
    """
    if re.fullmatch(r"[\d.]+", text):
        return hides_number(name, text)
    return bool(text) and is_secret(name)


def hides_number(name: str, text: str) -> bool:
    """Return whether a number of this name is a secret.

    Examples
    --------
    >>> hides_number("pin", "1234"), hides_number("token", "123456789"), hides_number("max_tokens", "1000000")
    (True, True, False)
    """
    words = _words(name)
    is_long = len(text) >= _LONG_NUMBER and text.isdigit() and not _MANY.search(words)
    return bool(_SECRET_NUMBER.search(words)) or (is_long and is_secret(name))


def _words(name: str) -> str:
    """Return the words of a name in small letters, with ``_`` between them.

    Examples
    --------
    >>> _words("accessKey"), _words("api-key")
    ('access_key', 'api_key')
    """
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def without_password(text: str, instead: str = "…@") -> str:
    """Return text whose URLs have no user, no password and no query of HTTP, so that everybody may read it.

    Examples
    --------
    >>> without_password("ftp://me:secret@host/models"), without_password("amqp://me:sec@ret@host")
    ('ftp://…@host/models', 'amqp://…@host')
    >>> without_password("https://host/rows.tfrecord?sig=secret is damaged")
    'https://host/rows.tfrecord?… is damaged'
    """
    return re.sub(r"(?i)(https?://[^\s?]*)\?[^\s'\"]+", r"\1?…", re.sub(r"(?<=:)//[^\s/]*@", f"//{instead}", text))


def without_secrets(text: str) -> str:
    """Return a text without the passwords, signatures and tokens of its URLs, options, headers and assignments.

    Examples
    --------
    >>> without_secrets("jdbc:postgresql://h/db?user=me&password=d34d"), without_secrets("s3://me:d3/4d@bucket/x")
    ('jdbc:postgresql://h/db?user=me&password=…', 's3://…@bucket/x')
    >>> without_secrets("--token=d34d --epochs 3"), without_secrets("Authorization: Bearer d34d")
    ('--token=… --epochs 3', 'Authorization: Bearer …')
    >>> without_secrets("host=h user=me password='d3 4d'"), without_secrets('{"api_key": "d34d", "lr": 0.1}')
    ('host=h user=me password=…', '{"api_key": …, "lr": 0.1}')
    >>> without_secrets("curl -u me:d34d https://host"), without_secrets("the key AKIAIOSFODNN7EXAMPLE is new")
    ('curl -u … https://host', 'the key … is new')
    """
    text = _OF_ORACLE.sub(rf"\1{HIDDEN}@", _PASSWORD_WITH_SLASH.sub(f"//{HIDDEN}@", text))
    text = _OF_A_SERVICE.sub(HIDDEN, without_password(text))
    text = _USER_OPTION.sub(rf"\g<name>{HIDDEN}", text)
    for one in (_IN_A_URL, _IN_A_HEADER, _COOKIES):
        text = one.sub(rf"\1{HIDDEN}", text)
    for names, values in ((_OPTION, _OPTIONS_VALUE), (_ASSIGNED, _ASSIGNED_VALUE)):
        text = _without_named(names, values, text)
    return text


def _without_named(names: re.Pattern[str], values: re.Pattern[str], text: str) -> str:
    """Hide the values of secret names. What follows another name may itself be a name with a value."""
    kept, at, done = list[str](), 0, 0
    while found := names.search(text, at):
        at = found.end()
        words = _words(found.group())
        value = values.match(text, at) if _SECRET.search(words) or _SECRET_NUMBER.search(words) else None
        if value is not None and hides(words, value.group().strip("'\"")):
            kept += [text[done:at], HIDDEN]
            at = done = value.end()
    return "".join([*kept, text[done:]])
