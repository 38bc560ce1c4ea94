# Multi-GPU SGD from first principles. `make help` lists the targets.

# ---- choices ------------------------------------------------------------------------------
REAL   ?= float
BUILD  ?= build
CXX    := $(if $(filter default,$(origin CXX)),g++,$(CXX))
NVCC   ?= nvcc
NATIVE ?= -march=native
BLAS_LIBS ?= -lopenblas
GPU_ARCH := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)

ifndef BACKEND
  ifeq ($(shell command -v $(NVCC)),)
    BACKEND := virtual
    WHY := no nvcc
  else
    BACKEND := $(if $(GPU_ARCH),cuda,virtual)
    WHY := nvcc and $(if $(GPU_ARCH),a GPU,no GPU)
  endif
  ifeq ($(filter help clean test papers curves pictures repetition timeline-%,$(MAKECMDGOALS)),)
    $(info BACKEND=$(BACKEND), for there is $(WHY))
  endif
endif
ifeq ($(and $(filter virtual cuda,$(BACKEND)),$(filter float double,$(REAL))),)
  $(error BACKEND is virtual or cuda, REAL is float or double; given $(BACKEND), $(REAL))
endif

export BLAS_LIBS CXX NVCC
export OPENBLAS_NUM_THREADS ?= 1
ifdef HARDWARE
  export VIRTUAL_GPU := $(HARDWARE)
endif
ifeq ($(MAKELEVEL),0)  # a -j on the command line has the last word
  MAKEFLAGS += -j$(shell expr $$(nproc) + 1)  # one more, for tests also wait
endif

# ---- what is built, and how ---------------------------------------------------------------
# A chapter is a folder with a main.cu; a new one needs no line here.
CHAPTERS := $(patsubst %/main.cu,%,$(wildcard 0*/main.cu))
comma    := ,
OUT      := $(BUILD)/$(BACKEND)-$(REAL)$(if $(SANITIZE),-$(subst $(comma),-,$(SANITIZE)))
PROGRAMS := $(CHAPTERS:%=$(OUT)/%)
# ONLY names a few. In double only what computes with `real`; the virtual GPU's own tests are the same for both.
ALL_TESTS := $(filter-out tests/main.cc,$(if $(filter double,$(REAL)),$(shell \
               grep -lE 'include "(harness|stages|\.\./common/sgd)' tests/*.cc),$(wildcard tests/*.cc)))
$(foreach t,$(ONLY),$(if $(wildcard tests/$t.cc),,$(error no tests/$t.cc, which ONLY names)))
SOURCES  := $(if $(ONLY),$(filter $(ONLY:%=tests/%.cc),$(ALL_TESTS)),$(ALL_TESTS))
TESTS    := $(SOURCES:tests/%.cc=$(OUT)/tests/%)
GPU_OUT  := $(BUILD)/virtual_gpu$(if $(SANITIZE),-$(subst $(comma),-,$(SANITIZE)))
OBJECTS  := $(patsubst virtual_gpu/src/%.cc,$(GPU_OUT)/%.o,$(wildcard virtual_gpu/src/*.cc))

# Without contraction a*b+c rounds twice everywhere, so that results can be compared.
# -Wno-restrict: g++ 12 warns of its own std::string (GCC bug 105651).
WARN     := -Wall -Wextra -Werror $(if $(findstring clang,$(CXX)),,-Wno-restrict)
DEFINES  := -DREAL=$(REAL)
DEPENDS   = -MMD -MP -MF $@.d -MT $@
HOST     := $(CXX) -std=c++20 -O3 -ffp-contract=off $(NATIVE) $(WARN) -pthread $(DEFINES) \
            -Ivirtual_gpu/include $(if $(SANITIZE),-g -O1 -fno-omit-frame-pointer -fsanitize=$(SANITIZE))
GPU_COMPILE := $(filter-out $(DEFINES),$(HOST))
LIBRARY  := $(GPU_OUT)/virtual_gpu.a
ifeq ($(BACKEND),virtual)
  COMPILE := $(HOST) -x c++
  LINK    := -x none $(LIBRARY) $(BLAS_LIBS) -lz
else
  COMPILE := $(NVCC) -std=c++20 -O3 -fmad=false --Werror all-warnings $(DEFINES) \
             -Xcompiler -ffp-contract=off$(comma)-pthread$(comma)-Wall$(comma)-Wextra$(comma)-Werror$(comma)-Wno-restrict \
             $(if $(GPU_ARCH),-arch=sm_$(GPU_ARCH),-gencode arch=compute_80$(comma)code=sm_80 \
               -gencode arch=compute_90$(comma)code=[sm_90$(comma)compute_90])
  LINK    := -lcublas -lnccl -lz
endif
CATCH_LIBS := $(if $(wildcard /usr/include/catch2/catch_all.hpp /usr/local/include/catch2/catch_all.hpp),-lCatch2)

.DEFAULT_GOAL := all
.PHONY: all run bench scaling mesh test test-one test-float test-double papers curves pictures
.PHONY: repetition help tools clean FORCE
.SECONDARY:
.SECONDEXPANSION:

all: $(PROGRAMS)  ## build all chapters (the default)

# Other flags or another compiler: everything is built again.
$(OUT)/flags: FORCE
	@mkdir -p $(@D) && echo '$(COMPILE) $(LINK)' | cmp -s - $@ || { \
	  tools/requirements.sh $(BACKEND) -q && echo '$(COMPILE) $(LINK)' > $@; }

$(OUT)/%: %/main.cu $(OUT)/flags $(if $(filter virtual,$(BACKEND)),$(LIBRARY))
	$(COMPILE) $(DEPENDS) $< $(LINK) -o $@

# The virtual GPU knows nothing of REAL: one library for both.
$(GPU_OUT)/flags: FORCE
	@mkdir -p $(@D) && echo '$(GPU_COMPILE)' | cmp -s - $@ || echo '$(GPU_COMPILE)' > $@
$(GPU_OUT)/%.o: virtual_gpu/src/%.cc $(GPU_OUT)/flags | $(OUT)/flags
	$(GPU_COMPILE) $(DEPENDS) -c $< -o $@
$(LIBRARY): $(OBJECTS)
	@rm -f $@
	ar rcs $@ $^

# Catch2's own runner knows nothing of REAL either, is none of what is tested, and with a sanitizer
# takes a minute to compile.
RUNNER := $(GPU_OUT)/tests_main.o
$(RUNNER): tests/main.cc $(GPU_OUT)/flags | $(OUT)/flags
	@tools/requirements.sh tests -q
	$(filter-out -fsanitize=%,$(GPU_COMPILE)) -O0 $(DEPENDS) -c $< -o $@
$(OUT)/tests/%.o: tests/%.cc $(OUT)/flags
	@mkdir -p $(@D) && tools/requirements.sh tests -q
	$(subst -O3,-O0,$(HOST)) $(DEPENDS) -c $< -o $@
$(OUT)/tests/%: $(OUT)/tests/%.o $(RUNNER) $(LIBRARY)
	$(HOST) $^ $(CATCH_LIBS) $(BLAS_LIBS) -lz -o $@

# Programs that tests start; what ThreadSanitizer must judge is built with it in any case.
$(OUT)/programs/%: tests/programs/%.cc $(OUT)/flags $(LIBRARY)
	@mkdir -p $(@D)
	$(subst -O3,-O1,$(HOST)) $(DEPENDS) $< $(LIBRARY) $(BLAS_LIBS) -lz -o $@
JUDGED := $(BUILD)/virtual-float-thread/programs/two_streams
ifneq ($(REAL)-$(SANITIZE),float-thread)
$(JUDGED): FORCE
	@$(MAKE) --no-print-directory BACKEND=virtual REAL=float SANITIZE=thread $@
endif
TEST_PROGRAMS := $(OUT)/programs/two_ranks \
                 $(if $(findstring address,$(SANITIZE))$(filter double,$(REAL)),,$(JUDGED))

-include $(wildcard $(OUT)/*.d $(OUT)/*/*.d $(GPU_OUT)/*.d)

# ---- running ------------------------------------------------------------------------------
chapter = $(firstword $(filter $1 $1_%,$(CHAPTERS)))
GPUS_OPTION = $(if $(GPUS),--gpus $(GPUS))

## run-NN            run a chapter (run-02 or run-02_data_parallel); ARGS="..." are its options
run-%: $$(addprefix $$(OUT)/,$$(call chapter,$$*))
	$(if $(call chapter,$*),,$(error no chapter $*; there is $(CHAPTERS)))
	@$(OUT)/$(call chapter,$*) $(GPUS_OPTION) $(ARGS)

# Runs every chapter quietly, each with $1, and prints a line of the table for each. Without GPUS
# on 4 GPUs, or 3 where a GPU needs a layer, or on as many as the chapter itself takes. A few steps
# more tell how busy virtual GPUs are; the run itself is followed by chapter 01's on the same GPU.
define table
	@rm -rf $(OUT)/$@ && mkdir -p $(OUT)/$@ && status=0; for c in $(CHAPTERS); do \
	  case $$c in 01_*) ranks=1 ;; 02_*|05_*) ranks=$(or $(GPUS),4) ;; \
	    04_*|06_*) ranks=$(or $(GPUS),3) ;; *) ranks=$(GPUS) ;; esac; \
	  ranks="$${ranks:+--gpus $$ranks} $(if $(filter cuda,$(BACKEND)),--share-gpu)"; \
	  $(OUT)/$$c --quiet --report $(OUT)/$@/$$c.json $1 $$ranks $(ARGS) > $(OUT)/$@/$$c.txt || \
	    { status=1; cat $(OUT)/$@/$$c.txt; }; \
	  $(if $(filter virtual,$(BACKEND)),VIRTUAL_GPU_STEPS=2:3 VIRTUAL_GPU_TEXT=$(OUT)/$@/$$c.busy \
	    $(OUT)/$$c --quiet $$ranks $(ARGS) --steps 5 2> /dev/null;) \
	done; for c in $(CHAPTERS); do cat $(OUT)/$@/$$c.busy $(OUT)/$@/$$c.json 2> /dev/null; done | \
	  awk -f tools/summary.awk; exit $$status
endef
run: $(PROGRAMS)  ## run all chapters on the digits, compare each with chapter 01, print one table
	$(call table,--check)
bench: $(OUT)/bench/step_time  ## chapter 01's step against the same arithmetic in plain CBLAS calls
	@$<
$(OUT)/bench/%: bench/%.cc $(OUT)/flags $(LIBRARY)
	@mkdir -p $(@D)
	$(HOST) $(DEPENDS) $< $(LIBRARY) $(BLAS_LIBS) -lz -o $@

scaling: $$(OUT)/$$(call chapter,$$(or $$(CHAPTER),02))  ## strong and weak scaling of CHAPTER=02 on 1 to GPUS=8 (or 1024) GPUs
	@tools/scaling.sh $< $(or $(GPUS),8) $(ARGS)

mesh: $$(OUT)/07_hybrid  ## every data x pipeline x tensor mesh of GPUS=8 GPUs: time, bytes, memory
	@tools/mesh.sh $< $(or $(GPUS),8) $(ARGS)

curves:  ## loss and accuracy by step and by the GPU's clock, as SVG in build/curves
	@$(MAKE) --no-print-directory BACKEND=virtual REAL=float \
	  $(patsubst %,$(BUILD)/virtual-float/%,$(filter 01% 02% 03% 08%,$(CHAPTERS)))
	@tools/curves.sh $(BUILD)/virtual-float $(BUILD)/curves

## timeline-NN       two or three steps of a chapter, as text and as build/timeline-NN.svg
timeline-%:
	$(if $(call chapter,$*),,$(error no chapter $*; there is $(CHAPTERS)))
	@$(MAKE) --no-print-directory -s BACKEND=virtual REAL=float \
	  $(BUILD)/virtual-float/$(call chapter,$*)
	@VIRTUAL_GPU_SVG=$${VIRTUAL_GPU_SVG:-$(BUILD)/$@.svg} \
	  tools/timeline.sh $(BUILD)/virtual-float/$(call chapter,$*) $(GPUS_OPTION) $(ARGS)

pictures:  ## the READMEs' timelines, in docs/pictures
	@$(MAKE) --no-print-directory BACKEND=virtual REAL=float all
	@tools/pictures.sh $(BUILD)/virtual-float docs/pictures

## profile-NN        a chapter in NVIDIA's profiler: build/profile-NN.nsys-rep (BACKEND=cuda)
profile-%: $$(if $$(filter cuda,$$(BACKEND)),$$(if $$(shell command -v nsys),$$(addprefix $$(OUT)/,$$(call chapter,$$*))))
	$(if $(call chapter,$*),,$(error no chapter $*; there is $(CHAPTERS)))
	@[ $(BACKEND) = cuda ] || { echo "BACKEND=$(BACKEND) has no profiler: BACKEND=cuda and a GPU would" \
	  "be right, or make timeline-$*" >&2; exit 2; }
	@command -v nsys > /dev/null || { echo "nsys: not found; NVIDIA's nsight-systems brings it" >&2; exit 2; }
	nsys profile --trace=cuda,nvtx,cublas --force-overwrite=true --output=$(BUILD)/$@ \
	  $(OUT)/$(call chapter,$*) $(GPUS_OPTION) $(ARGS)

## diff-NN           what a chapter changes in the one that it builds on
diff-%:
	$(if $(call chapter,$*),,$(error no chapter $*; there is $(CHAPTERS)))
	@new=$(call chapter,$*)/train.cuh; base=$$(sed -n '1s/.*Base: *\([0-9a-z_]*\).*/\1/p' $$new); \
	if [ -f "$$base/train.cuh" ]; then diff -u $$base/train.cuh $$new || [ $$? = 1 ]; \
	else echo "chapter $* builds on no other"; fi

repetition:  ## what part of the chapters' lines is distinct, and how many each technique changes
	@tools/repetition.sh $(CHAPTERS)

# ---- testing ------------------------------------------------------------------------------
test:  ## all tests, in float and in double; the last line is "N passed, N failed"
	@rm -rf $(BUILD)/counts; mkdir -p $(BUILD)/counts
	@$(MAKE) -k --no-print-directory BACKEND=virtual REAL=float $(LIBRARY) $(RUNNER) || :
	@$(MAKE) -k --no-print-directory test-float test-double || :
	@tools/summary.sh $(BUILD)/counts
test-float test-double: test-%:  # together, so that one computes while the other waits
	@$(MAKE) -k --no-print-directory BACKEND=virtual REAL=$* test-one || \
	  echo "0 1" > $(BUILD)/counts/$*-did-not-build

# Each test program leaves "passed failed"; one that crashes leaves no failure of its own, so its
# exit status counts as one. What it says is shown when it has ended, for two run at a time. In
# double the chapters are tested in the tests' own process; their programs, and the order of events,
# are the same in float.
test-one: $(TESTS:%=%.ran)
$(OUT)/tests/%.ran: $(OUT)/tests/% $(if $(filter double,$(REAL)),,$(PROGRAMS) $(TEST_PROGRAMS)) FORCE
	@mkdir -p $(BUILD)/counts; counts=$(BUILD)/counts/$(notdir $(OUT))-$*; rm -f $$counts $$counts.said; \
	COUNTS=$$counts $< $(TEST_ARGS) $(if $(filter double,$(REAL)),'~[program]~[order]~[.]') < /dev/null > $@ 2>&1 || \
	  grep -qs ' [1-9]' $$counts || echo "0 1" >> $$counts; \
	cp $@ $$counts.said; echo "== $<"; cat $@

papers:  ## write docs/papers.md: what papers print, beside the programs' own
	@$(MAKE) --no-print-directory BACKEND=virtual REAL=float ONLY=test_papers \
	  PAPERS=docs/papers.md test-one

# ---- and the rest -------------------------------------------------------------------------
tools:  ## what this machine has for building, and which package brings what is missing
	@tools/requirements.sh $(BACKEND)

clean:  ## remove everything built
	rm -rf $(BUILD)

help:  ## this list
	@awk -F ':.*## ' '/^## / { print "  " substr($$0, 4) } \
	  /^[a-z-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' Makefile
	@echo "variables:"
	@echo "  BACKEND=virtual|cuda  REAL=float|double  GPUS=P  ARGS=\"--batch 32 ...\"  CHAPTER=NN (scaling)"
	@echo "  HARDWARE=preset (virtual GPU)  SANITIZE=thread|address,undefined  CXX  NVCC"
	@echo "  BLAS_LIBS=-lopenblas  NATIVE=-march=native  BUILD=build"
	@echo "this machine:"
	@tools/requirements.sh $(BACKEND) | sed 's/^/  /'
