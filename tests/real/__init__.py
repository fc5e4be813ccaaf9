"""Real parts as processes of a test: vLLM's Rust server, Dynamo's frontend and sidecar."""
