#!/usr/bin/env bash
# An API key for clients: set VLLM_API_KEY. A token for gated models: set HF_TOKEN.
$notes
$command
