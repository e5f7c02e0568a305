# $(BUILD)/hip/libamdhip64-emu.so: a HIP runtime that runs the machine code of code objects on the CPU. Included by tests/hip/hip.mk.
# The operations are compiled for each level of the host's instruction set; the best one is taken at run time.

# Half floats of the host: gcc 12, or clang 15; an older $(CC) leaves this part to another compiler (make clang does).
EMU_CC    ?= $(CC)
EMU_DIR    = $(BUILD)/obj/tests/hip/emu
EMU_OPS    = $(notdir $(basename $(wildcard tests/hip/emu/op_*.c)))
EMU_PARTS  = api queue graph memory object decode run report
EMU_LEVELS = base
ifeq ($(shell uname -m),x86_64)
EMU_LEVELS += avx2 avx512
endif
EMU_OBJ    = $(EMU_PARTS:%=$(EMU_DIR)/%.o) $(foreach level,$(EMU_LEVELS),$(EMU_OPS:%=$(EMU_DIR)/%_$(level).o))
EMU_FLAGS  = $(CFLAGS) -fPIC -fvisibility=hidden
# Registers are words that operations look at as floats; the comparisons may be computed for lanes that do not need them.
EMU_HOT    = $(HOT) -fno-strict-aliasing -fno-trapping-math

EMU_ISA_avx2   = -mavx2 -mfma -mf16c
EMU_ISA_avx512 = -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512

$(EMU_PARTS:%=$(EMU_DIR)/%.o): $(EMU_DIR)/%.o: tests/hip/emu/%.c
	@mkdir -p $(@D)
	$(EMU_CC) $(EMU_FLAGS) -MMD -MP -c -o $@ $<

define EMU_LEVEL_RULE
$$(EMU_OPS:%=$$(EMU_DIR)/%_$(1).o): $$(EMU_DIR)/%_$(1).o: tests/hip/emu/%.c
	@mkdir -p $$(@D)
	$$(EMU_CC) $$(EMU_FLAGS) $$(EMU_HOT) $$(EMU_ISA_$(1)) -DEMU_LEVEL=$(1) -MMD -MP -c -o $$@ $$<
endef
$(foreach level,$(EMU_LEVELS),$(eval $(call EMU_LEVEL_RULE,$(level))))

$(BUILD)/hip/libamdhip64-emu.so: $(EMU_OBJ)
	@mkdir -p $(@D)
	$(EMU_CC) $(SAN) -shared -o $@ $^ -lm -pthread

HIP_STANDINS += $(BUILD)/hip/libamdhip64-emu.so
DEPS += $(EMU_OBJ:.o=.d)

# ---- the emulator's own test: its kernels for one target of each kind ----

EMU_TEST_TARGETS = gfx1100 gfx1152 gfx1201
ifneq ($(HIP_CC),)
EMU_TEST_OBJECTS = $(EMU_TEST_TARGETS:%=$(BUILD)/hip/emu_kernels_%.hsaco)
$(BUILD)/hip/emu_kernels_%.hsaco: tests/hip/emu_kernels.hip
	@mkdir -p $(@D)
	$(HIP_CC) $(HIP_FLAGS) --offload-arch=$* -MMD -MP -MF $@.d -MT $@ -o $@ $<
$(BUILD)/tests/hip/test_emulator: | $(EMU_TEST_OBJECTS) $(BUILD)/hip/libamdhip64-emu.so
HIP_STANDINS += $(EMU_TEST_OBJECTS)
DEPS += $(EMU_TEST_OBJECTS:=.d)
endif
