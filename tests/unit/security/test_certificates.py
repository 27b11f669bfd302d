"""Errors of certificates name the files that are wrong, and no others."""

import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from genserve.security.certificates import check_accepted, check_files, check_own
from genserve.security.files import CertificateError, CertificateFiles
from tests.support.credentials import Authority


def test_the_file_that_is_wrong_is_named_by_its_flag(tmp_path: Path) -> None:
    """Of a certificate and a key that do not belong together, both are."""
    authority = Authority(tmp_path)
    mine, other = authority.issue("mine"), authority.issue("other")
    files = CertificateFiles(mine.cert_file, mine.key_file, authority.ca_file)
    check_files(files)
    pair = f"--ssl-certfile {mine.cert_file} and --ssl-keyfile {other.key_file}: "
    for wrong, names in (
        (replace(files, ca_certs="/nowhere"), "--ssl-ca-certs /nowhere: "),
        (replace(files, ca_certs=mine.key_file), f"--ssl-ca-certs {mine.key_file}: "),
        (replace(files, keyfile=other.key_file), pair),
        (replace(files, keyfile=other.key_file, ca_certs=""), pair),
    ):
        with pytest.raises(CertificateError, match=f"^{re.escape(names)}"):
            check_files(wrong)


def test_a_certificate_that_clients_would_refuse_is_found_before_they_do(tmp_path: Path) -> None:
    """`serve --check` asks for it. A server takes such a certificate: only its clients end the handshake."""
    authority = Authority(tmp_path)
    valid, expired = (
        authority.issue("127.0.0.1"),
        authority.issue("127.0.0.1", expires=datetime(2020, 1, 1, tzinfo=UTC)),
    )
    check_accepted(CertificateFiles(valid.cert_file, valid.key_file))
    check_files(CertificateFiles(expired.cert_file, expired.key_file))
    with pytest.raises(CertificateError, match=f"--ssl-certfile {expired.cert_file}: .*expired"):
        check_accepted(CertificateFiles(expired.cert_file, expired.key_file))


def test_a_certificate_without_its_key_says_what_is_missing(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("127.0.0.1")
    with pytest.raises(CertificateError, match=f"{pair.cert_file}: .*key"):
        check_own("", pair.cert_file, "")
