##@ Patches
.PHONY: patches
patches: setup ## Apply our series to their public roots: [SERIES= REFRESH=1 OUT=DIR SRC_<NAME>=path-or-url]
	@exec $(LANEKIT) patches $(SERIES) $(call switch,REFRESH,--refresh) $(call option,OUT,--out)
