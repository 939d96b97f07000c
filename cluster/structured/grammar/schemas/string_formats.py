"""The formats of strings in JSON schemas, as regular expressions."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["STRING_FORMATS", "StringFormat"]

_DATE = (
    r"[0-9]{3}[1-9]-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
    r"|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
)
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?{_ZONE}"
_NUMBER = "[0-9]{1,4}"
_MINUTES = f"{_NUMBER}M(?:{_NUMBER}S)?"
_DURATION_TIME = f"T(?:{_NUMBER}H(?:{_MINUTES})?|{_MINUTES}|{_NUMBER}S)"
_MONTHS = f"{_NUMBER}M(?:{_NUMBER}D)?"
_DURATION_DATE = f"(?:{_NUMBER}Y(?:{_MONTHS})?|{_MONTHS}|{_NUMBER}D)"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Each character costs time to compile, so labels, atoms and paths are shorter than the standards
# allow.
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,18}[A-Za-z0-9])?"
_ATOM = "[A-Za-z0-9_+-]"
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"
_URI_TEXT = "[A-Za-z0-9._~!$&'()*+,;=:@/-]"


@dataclass(frozen=True, slots=True)
class StringFormat:
    """Strings of one format; each is valid, but there may be others."""

    pattern: str
    min_length: int
    max_length: int


STRING_FORMATS: Mapping[str, StringFormat] = {
    "date": StringFormat(rf"^{_DATE}$", 10, 10),
    "time": StringFormat(rf"^{_TIME}$", 9, 21),
    "date-time": StringFormat(rf"^{_DATE}T{_TIME}$", 20, 32),
    "duration": StringFormat(
        rf"^P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|{_NUMBER}W)$", 3, 32
    ),
    "email": StringFormat(
        rf"^{_ATOM}{{1,20}}(?:\.{_ATOM}{{1,12}}){{0,2}}@{_LABEL}(?:\.{_LABEL})?\.[A-Za-z]{{2,12}}$",
        6,
        101,
    ),
    "hostname": StringFormat(rf"^{_LABEL}(?:\.{_LABEL}){{0,3}}$", 1, 83),
    "ipv4": StringFormat(rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$", 7, 15),
    "ipv6": StringFormat(
        rf"^(?:(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}:){{1,4}}(?::{_GROUP}){{1,3}}"
        rf"|::(?:{_GROUP}:){{0,5}}{_GROUP})$",
        3,
        39,
    ),
    "uri": StringFormat(
        rf"^https?://{_LABEL}(?:\.{_LABEL}){{1,2}}(?::[1-9][0-9]{{0,3}})?"
        rf"(?:/{_URI_TEXT}{{0,80}}(?:\?{_URI_TEXT}{{1,40}})?)?$",
        10,
        197,
    ),
    "uuid": StringFormat(
        rf"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$", 36, 36
    ),
}
