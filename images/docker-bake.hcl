# The image graph. A target is a folder; its parent is the context `parent`, so a child builds on
# what was just built, without a registry between. Versions come from pins.toml: `make image-NAME`
# hands every ARG of a Dockerfile its value, each base its digest, and the roots somebody overrode.

variable "STACK" {}
variable "REGISTRY" {}

function "tags" {
  params = [name]
  result = ["${REGISTRY}/${name}:${STACK}"]
}

group "default" {
  targets = ["aiperf", "llmd", "vllm-cpu", "vllm", "sglang", "trtllm", "megatron", "nemo-rl", "v1"]
}

group "v1" {
  targets = ["vllm-v1", "sglang-v1", "megatron-v1", "nemo-rl-v1"]
}

# tools and guard are mounted, never copied: a change of one rebuilds only the steps that use it.
target "_common" {
  contexts = {
    tools   = "images/tools"
    guard   = "images/guard"
    patches = "patches"
  }
  # zstd: gzip took longer over vllm-cpu than installing it (2026-11-30).
  output = ["type=docker,compression=zstd,compression-level=1"]
  attest = ["type=provenance,mode=max"]
  labels = {
    "org.opencontainers.image.licenses" = "Apache-2.0"
    "lanes.stack"                       = STACK
  }
}

# --- beside the transports -------------------------------------------------------------------

target "aiperf" {
  inherits = ["_common"]
  context  = "images/aiperf"
  tags     = tags("aiperf")
}

target "llmd" {
  inherits = ["_common"]
  context  = "images/llmd"
  tags     = tags("llmd")
}

target "vllm-cpu" {
  inherits = ["_common"]
  context  = "images/vllm-cpu"
  contexts = { evidence = "scripts/evidence" }
  tags     = tags("vllm-cpu")
}

# --- transports ------------------------------------------------------------------------------

target "transport-base" {
  inherits = ["_common"]
  context  = "images/transport-base"
  tags     = tags("transport-base")
}

target "transport-v2" {
  inherits = ["_common"]
  context  = "images/transport-v2"
  contexts = { parent = "target:_transport-base", evidence = "scripts/evidence" }
  tags     = tags("transport-v2")
}

target "transport-v1" {
  inherits = ["_common"]
  context  = "images/transport-v1"
  contexts = { parent = "target:_transport-base", evidence = "scripts/evidence" }
  tags     = tags("transport-v1")
}

# --- engines ---------------------------------------------------------------------------------

target "vllm" {
  inherits = ["_common"]
  context  = "images/vllm"
  contexts = { parent = "target:_transport-v2" }
  tags     = tags("vllm")
}

target "vllm-v1" {
  inherits = ["vllm"]
  contexts = { parent = "target:_transport-v1" }
  tags     = tags("vllm-v1")
}

target "sglang" {
  inherits = ["_common"]
  context  = "images/sglang"
  contexts = { parent = "target:_transport-v2" }
  tags     = tags("sglang")
}

target "sglang-v1" {
  inherits = ["sglang"]
  contexts = { parent = "target:_transport-v1" }
  tags     = tags("sglang-v1")
}

target "trtllm" {
  inherits = ["_common"]
  context  = "images/trtllm"
  contexts = { parent = "target:_transport-v2" }
  tags     = tags("trtllm")
}

target "megatron" {
  inherits = ["_common"]
  context  = "images/megatron"
  contexts = { parent = "target:_transport-v2" }
  tags     = tags("megatron")
}

target "megatron-v1" {
  inherits = ["megatron"]
  contexts = { parent = "target:_transport-v1" }
  tags     = tags("megatron-v1")
}

target "nemo-rl" {
  inherits = ["_common"]
  context  = "images/nemo-rl"
  contexts = { parent = "target:_megatron" }
  tags     = tags("nemo-rl")
}

target "nemo-rl-v1" {
  inherits = ["nemo-rl"]
  contexts = { parent = "target:_megatron-v1" }
  tags     = tags("nemo-rl-v1")
}

# --- what children build on ------------------------------------------------------------------

# A parent before its guard, so that children run the guard of today and none of their installs again
# when it changes. Never an image: without an output of its own, the docker driver exports a linked
# target as well, and under its parent's tag (buildx 0.13.1, 2026-11-30).

target "_made" {
  target = "made"
  output = ["type=cacheonly"]
  tags   = []
}

target "_transport-base" {
  inherits = ["transport-base", "_made"]
}

target "_transport-v1" {
  inherits = ["transport-v1", "_made"]
}

target "_transport-v2" {
  inherits = ["transport-v2", "_made"]
}

target "_megatron" {
  inherits = ["megatron", "_made"]
}

target "_megatron-v1" {
  inherits = ["megatron-v1", "_made"]
}
