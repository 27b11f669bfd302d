"""Errors of certificates name the files that are wrong, and no others."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from genserve.security.certificates import check_files
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
        (replace(files, ca_certs="/nowhere"), "--ssl-ca-certs /nowhere: No such file"),
        (replace(files, ca_certs=mine.key_file), f"--ssl-ca-certs {mine.key_file}: "),
        (replace(files, keyfile=other.key_file), pair),
        (replace(files, keyfile=other.key_file, ca_certs=""), pair),
    ):
        with pytest.raises(CertificateError, match=f"^{re.escape(names)}"):
            check_files(wrong)
