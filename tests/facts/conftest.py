"""pyinfra-testing, without what its import does to the process."""

from __future__ import annotations

from unittest.mock import patch

# It imports pyinfra_cli, and that swaps threads and sockets of the whole process for gevent's. The
# server's tests in the same process need the real ones.
with patch("gevent.monkey.patch_all"):
    import pyinfra_cli  # noqa: F401
