# The GPU's code objects, the two stand-ins for AMD's runtime library, and the tests that use them. Included by the Makefile.
#
#   HIP_TARGETS="gfx1152"   compile the kernels for these only (quick), or for none: HIP_TARGETS=
#   $(BUILD)/hip/kernels.hipfb            all targets in one bundle, embedded in the binary; without a suitable clang, or without targets, a text that says so
#   $(BUILD)/hip/libamdhip64-shim.so      kernels compiled for the CPU, a fiber for each GPU thread (gpu_shim.h)
#   $(BUILD)/hip/libamdhip64-emu.so       the code objects' machine code, emulated

HIP_ALL     := gfx1100 gfx1101 gfx1102 gfx1103 gfx1150 gfx1151 gfx1152 gfx1200 gfx1201
HIP_TARGETS ?= $(HIP_ALL)
HIP_CC      := $(shell tools/find-hipcc.sh)
HIP_FLAGS    = -x hip --offload-device-only --no-gpu-bundle-output -nogpuinc -nogpulib -fuse-cuid=none -O3 -std=c++17 -I. \
               -ffp-contract=off -fno-strict-aliasing -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Werror
comma       := ,
empty       :=
HIP_OBJECTS  = $(HIP_TARGETS:%=$(BUILD)/hip/%.hsaco)

# Remakes the bundle when the list of targets, or the compiler, has changed.
$(BUILD)/hip/targets: FORCE
	@mkdir -p $(@D)
	@echo "$(HIP_CC) $(HIP_TARGETS)" | cmp -s - $@ || echo "$(HIP_CC) $(HIP_TARGETS)" >$@

ifneq ($(and $(HIP_CC),$(strip $(HIP_TARGETS))),)
$(BUILD)/hip/%.hsaco: hip/kernels/kernels.hip
	@mkdir -p $(@D)
	$(HIP_CC) $(HIP_FLAGS) --offload-arch=$* -MMD -MP -MF $@.d -MT $@ -o $@ $<

HIP_BUNDLER = $(shell $(HIP_CC) -print-prog-name=clang-offload-bundler)
$(BUILD)/hip/kernels.hipfb: $(HIP_OBJECTS) $(BUILD)/hip/targets
	$(HIP_BUNDLER) -type=o -bundle-align=4096 \
	    -targets=$(subst $(empty) $(empty),$(comma),host-x86_64-unknown-linux $(HIP_TARGETS:%=hipv4-amdgcn-amd-amdhsa--%)) \
	    -input=/dev/null $(HIP_OBJECTS:%=-input=%) -output=$@
else
$(BUILD)/hip/kernels.hipfb: $(BUILD)/hip/targets
	@echo "bedside: building without GPU kernels: $(if $(strip $(HIP_TARGETS)),no clang 19 for AMD GPUs (packages clang-19 lld-19 llvm-19 clang-tools-19),HIP_TARGETS names no GPU (make run names those it finds))" >&2
	@echo "This build has no GPU kernels." >$@
endif

# One target, for a look at its code: make $(BUILD)/hip/dev.hsaco
$(BUILD)/hip/dev.hsaco: $(BUILD)/hip/gfx1152.hsaco
	cp $< $@

$(BUILD)/obj/hip/bundle.o: hip/bundle.S $(BUILD)/hip/kernels.hipfb
	@mkdir -p $(@D)
	$(CC) $(SAN) -DHIP_BUNDLE='"$(BUILD)/hip/kernels.hipfb"' -c -o $@ $<

# ---- stand-ins for the runtime library ----

CXX       ?= c++
SHIM_FLAGS = -std=c++17 -I. -O2 -g $(SAN) -fPIC -fvisibility=hidden -pthread -ffp-contract=off -fno-strict-aliasing \
             -Wall -Wextra -Wconversion -Wno-sign-conversion -Wno-psabi -Wno-maybe-uninitialized -Werror
SHIM_OBJ   = $(addprefix $(BUILD)/obj/tests/hip/,shim_fibers.o shim_kernels.o shim_runtime.o)

# The fibers are the race detector's threads: it must not watch the code that switches them.
$(BUILD)/obj/tests/hip/shim_fibers.o: SHIM_SAN = $(if $(findstring thread,$(SAN)),-fno-sanitize=thread -DSHIM_TSAN)
$(BUILD)/obj/tests/hip/%.o: tests/hip/%.cpp
	@mkdir -p $(@D)
	$(CXX) $(SHIM_FLAGS) $(SHIM_SAN) -MMD -MP -c -o $@ $<

$(BUILD)/hip/libamdhip64-shim.so: $(SHIM_OBJ)
	@mkdir -p $(@D)
	$(CXX) $(SHIM_FLAGS) -shared -o $@ $^

# The same under sanitizers, whatever the rest is built with: memory of the "device" then has guarded ends, and undefined behaviour stops the program.
SANITIZED     = -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
SANITIZED_OBJ = $(SHIM_OBJ:$(BUILD)/obj/tests/hip/%=$(BUILD)/obj/tests/hip/sanitized/%)
$(BUILD)/obj/tests/hip/sanitized/%.o: tests/hip/%.cpp
	@mkdir -p $(@D)
	$(CXX) $(SHIM_FLAGS) $(SANITIZED) -MMD -MP -c -o $@ $<

$(BUILD)/hip/libamdhip64-sanitized.so: $(SANITIZED_OBJ)
	@mkdir -p $(@D)
	$(CXX) $(SHIM_FLAGS) $(SANITIZED) -shared -o $@ $^

# A runtime without kernels that fails where it is told to, for the tests of the host side.
$(BUILD)/hip/libamdhip64-faulty.so: tests/hip/faulty_runtime.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -fPIC -shared -fvisibility=hidden -MMD -MP -MF $@.d -o $@ $<

# ---- tests ----

HIP_TESTS  = $(patsubst %.c,$(BUILD)/%,$(wildcard tests/hip/test_*.c))
SHIM_TEST  = $(BUILD)/tests/hip/test_shim
HIP_STANDINS = $(BUILD)/hip/libamdhip64-shim.so $(BUILD)/hip/libamdhip64-faulty.so $(if $(SAN),,$(BUILD)/hip/libamdhip64-sanitized.so)
-include tests/hip/emu/emu.mk # adds libamdhip64-emu.so

$(BUILD)/tests/hip/%: tests/hip/%.c $(LIB)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -MF $@.d -o $@ $< $(LIB) -lcmocka $(LDLIBS)

$(SHIM_TEST): tests/hip/test_shim.cpp $(BUILD)/obj/tests/hip/shim_fibers.o
	@mkdir -p $(@D)
	$(CXX) $(SHIM_FLAGS) -MMD -MP -MF $@.d -o $@ $(filter %.cpp %.o,$^)

hip-tests: $(HIP_TESTS) $(SHIM_TEST) $(HIP_STANDINS)

# Every HIP test in full length, and the gates over the code objects of all targets.
test-hip: deps
	@$(MAKE) --no-print-directory -j$(JOBS) all hip-tests $(BUILD)/hip/kernels.hipfb
	BEDSIDE_HIP_TESTS=all tests/run.sh $(BUILD) tests/hip/

DEPS += $(HIP_OBJECTS:=.d) $(SHIM_OBJ:.o=.d) $(SANITIZED_OBJ:.o=.d) $(HIP_TESTS:=.d) $(SHIM_TEST:=.d)

FORCE:
.PHONY: hip-tests test-hip FORCE
