"""How a client and a backend show each other that they know the same token, which never travels.

    client                                  backend
    Hello(nonce c, version)         ->
                                    <-      Challenge(nonce s, HMAC(token, "backend", c, s))
    Proof(HMAC(token, "client", c, s)) ->
                                    <-      Welcome

The backend goes first: who only listens at an address learns nothing that depends on the token. Each
nonce is fresh, so a recorded proof is of no use later. The roles have labels of their own, so a proof
that is sent back to its maker proves nothing. Standard library only.
"""

import hmac
import secrets

#: Shortest token that is taken: whoever has seen a proof can try guesses against it.
MIN_TOKEN = 32
#: Before a peer has proved that it knows the token, its messages may have so many bytes.
MAX_HELLO = 4096
#: So long it may take until it has.
HELLO_SECONDS = 5.0
#: Of the label. The version of the messages is compared before any proof, so that it can be named.
FORM = 3
BACKEND = "backend"
CLIENT = "client"
_NONCE_BYTES = 32


def new_nonce() -> str:
    """Return 32 random bytes as 64 hexadecimal digits."""
    return secrets.token_hex(_NONCE_BYTES)


def is_nonce(text: str) -> bool:
    """Return whether ``text`` has the form of ``new_nonce``; two of one length join in one way only."""
    return len(text) == 2 * _NONCE_BYTES and all(digit in "0123456789abcdef" for digit in text)


def proof(token: str, role: str, client_nonce: str, backend_nonce: str) -> str:
    """Return the proof that ``role`` knows ``token``: HMAC-SHA256 of role and nonces, as hex digits."""
    label = f"parallel-dit {FORM} {role} {client_nonce} {backend_nonce}"
    return hmac.digest(token.encode(errors="surrogateescape"), label.encode(), "sha256").hex()


def is_proof(received: str, token: str, role: str, client_nonce: str, backend_nonce: str) -> bool:
    """Return whether ``received`` is that proof; takes the same time wherever the two differ."""
    expected = proof(token, role, client_nonce=client_nonce, backend_nonce=backend_nonce)
    return hmac.compare_digest(received.encode(errors="replace"), expected.encode())
