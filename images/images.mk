# Images: thin calls of lanekit, included by the Makefile. BASE_IMAGE= SRC_NAME= CA_BUNDLE= and
# PIP_CONFIG= reach lanekit through the environment, where make puts what its command line sets.
STACK_OPTION = $(call option,STACK,--stack)

.PHONY: images image-graph pins

##@ Images
image-graph: setup ## Print the image graph; it is drawn in images/README.md
	@$(LANEKIT) image graph $(STACK_OPTION)

image-%: setup ## Build an image, or all a lane needs (image-vllm): [STACK= PROFILE= PLAN=1]
	@exec $(LANEKIT) image build $* $(STACK_OPTION) $(call option,PROFILE,--profile) \
	  $(if $(PLAN),--plan)

images: setup ## Build every image of the graph
	@exec $(LANEKIT) image build --all $(STACK_OPTION) $(if $(PLAN),--plan)

push-%: setup ## Push an image, never over an existing tag, and record its digest: [REGISTRY=]
	@exec $(LANEKIT) image push $* $(STACK_OPTION) $(call option,REGISTRY,--registry)

pull-%: setup ## Pull an image by its digest in images/images.lock and verify it: [REGISTRY=]
	@exec $(LANEKIT) image pull $* $(STACK_OPTION) $(call option,REGISTRY,--registry)

pins: setup ## Every pin in every stack, and which ones lag
	@$(LANEKIT) pins
