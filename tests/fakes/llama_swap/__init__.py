"""A stand-in for llama-swap where the real one cannot be had: its documented API before real llama-servers.

It reads the same configuration and takes the same flags, so that LLAMA_SWAP_BIN can put the real one in its
place. What it does was read in llama-swap's source as of autumn 2026 (files of mostlygeek/llama-swap):

- internal/server/server.go, api.go, apigroup.go, auth.go: the routes, /running, /v1/models, unloading,
  /upstream/{model}/ with its redirects and `upstream.ignorePaths`, API keys, which are not passed on;
- internal/swaputil/http.go, httperror.go: how a request names a model; errors as in v250;
- internal/server/filters.go: `useModelName`, and filters but for setParamsByMatch and paths as their keys;
- internal/router/scheduler/fifo.go, internal/router/base.go, group.go: what is evicted for what; that a
  busy model is waited for; that requests for one model share a swap; how many requests a model may have;
- internal/process/process_command.go: states, health checks, SIGTERM to the process group and SIGKILL after
  a grace, `ttl`, and what a client sees when a model's process is gone;
- internal/config/config.go, config.example.yaml: defaults.

It does two things quicker: a starting model is asked for its health every 50 ms (there: after 250 ms, then
every second), and an idle one for its `ttl` as often (there: every second). Not here: matrix, peers,
selectors, profiles, hooks, macros but PORT, MODEL_ID and env.NAME, logs, metrics, pages. Of
sendLoadingState only the first line.
"""
