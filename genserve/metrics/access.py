"""Who may scrape: whoever is listed with a token, over the TLS of the other ports."""

from genserve.errors import UnauthenticatedError
from genserve.metrics.http import Access
from genserve.rpc.access import Callers, bearer_token
from genserve.security.certificates import server_context
from genserve.settings.listen_config import ListenConfig


def access_of(config: ListenConfig, callers: Callers | None) -> Access:
    """As the other ports of a process have it. A role that may see the state may see the series, and each may."""
    tls = None if config.certificate is None else server_context(config.certificate)
    if callers is None:
        return Access(None, tls)

    def authorize(header: str | None) -> bool:
        try:
            token = bearer_token(() if header is None else (("authorization", header),))
        except UnauthenticatedError:
            return False
        return token is not None and callers.of_token(token) is not None

    return Access(authorize, tls)
