"""Why a request reused no more of its prompt, and what operators see of requests and the store."""
