"""Why a request reused less of its prompt than somebody might expect."""
