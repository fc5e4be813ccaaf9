# One name for every common task. `make` alone lists them.
BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help setup demo prove test lint types ci full docs proto vllm-env

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/rollplane:
	$(MAKE) setup

setup: ## Make .venv and install Rollplane with the embedded engine, gRPC and the tests' tools
	python3 -m venv .venv
	$(BIN)/pip install -c constraints.txt -e '.[embedded,grpc,test]'

demo: | $(BIN)/rollplane ## Train a tiny policy with GRPO through the whole stack, on one CPU
	$(BIN)/python -m rollplane.demo

prove: | $(BIN)/rollplane ## Show that RL runs end to end on real vLLM: broadcast, adapters, images, routed replay
	bash scripts/make_vllm_env.sh
	bash scripts/fetch_vllm_rs.sh
	$(BIN)/rollplane prove --json runs/proof.json

test: ## Run the tests that need no other environment (unit, contract, e2e)
	$(BIN)/pytest

lint: ## Check format, lint, docstring coverage and import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/interrogate src
	$(BIN)/lint-imports

types: ## Type-check src with mypy --strict
	$(BIN)/mypy --strict src

ci: ## Run what CI runs, from the set-up on
	bash .ci/run

full: ## Run everything, with what is too long for CI
	bash .ci/full

docs: ## Build the documentation site into build/site
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

proto: ## Make the Python of the gRPC contract from its .proto files
	bash scripts/generate_grpc.sh

vllm-env: ## Make the environments of the real parts: vLLM on a CPU, its Rust server, Dynamo
	bash scripts/make_vllm_env.sh
	bash scripts/fetch_vllm_rs.sh
	bash scripts/make_dynamo_env.sh
	bash scripts/add_dynamo_runtime.sh
