# bedside. Two commands matter: `make run` and `make test`. `make help` lists the rest.

MODEL  ?= $(or $(BEDSIDE_MODEL),tests/demo-model/demo-q4_k_m.gguf)
BUILD  ?= build
JOBS   ?= $(shell nproc 2>/dev/null || echo 1)
CC     ?= cc
OPT    ?= -O2 -g
SAN    ?=

PKGS    = libmicrohttpd jansson libuv libsodium
CFLAGS  = -std=c17 -D_GNU_SOURCE -I. $(OPT) $(SAN) -fno-math-errno -ffp-contract=off -pthread -fPIE \
          -Wall -Wextra -Wshadow -Wconversion -Werror $(shell pkg-config --cflags $(PKGS) 2>/dev/null)
LDLIBS  = $(shell pkg-config --libs $(PKGS) 2>/dev/null) -lunistring -lm -pthread

SRC     = $(filter-out server/main.c,$(wildcard base/*.c config/*.c engine/*.c engine/cpu/*.c hip/*.c api/*.c server/*.c))
OBJ     = $(SRC:%.c=$(BUILD)/obj/%.o) $(BUILD)/obj/hip/bundle.o
LIB     = $(BUILD)/libbedside.a
TESTS   = $(patsubst %.c,$(BUILD)/%,$(wildcard tests/unit/test_*.c tests/golden/test_*.c))
BENCHES = $(patsubst %.c,$(BUILD)/%,$(wildcard tests/bench/bench_*.c) tests/bench/hip_model.c)
FUZZERS = $(patsubst %.c,$(BUILD)/%,$(wildcard tests/fuzz/fuzz_*.c))
DEPS    = $(OBJ:.o=.d) $(BUILD)/obj/server/main.d $(TESTS:=.d) $(BENCHES:=.d) $(FUZZERS:=.d)

# Kernels are compiled for their instruction set and chosen at run time; everything else runs on any x86-64 (or other 64-bit) machine.
HOT     = -O3
ifeq ($(shell uname -m),x86_64)
AVX2    = -mavx2 -mfma -mf16c
AVX512  = -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c
endif

all: $(BUILD)/bedside

# GPU kernels for the GPUs of this machine only (three minutes for all of them), unless HIP_TARGETS says which; `make` compiles all.
RUN_TARGETS = $(if $(filter file,$(origin HIP_TARGETS)),$(filter $(HIP_ALL),$(shell tools/gpu-targets.sh)),$(HIP_TARGETS))

run:
	@tools/install-deps.sh $(if $(strip $(RUN_TARGETS)),,--no-gpu)
	@$(MAKE) --no-print-directory -j$(JOBS) HIP_TARGETS="$(RUN_TARGETS)" all
	$(BUILD)/bedside serve --model "$(MODEL)"

test: deps
	@$(MAKE) --no-print-directory -j$(JOBS) all tests hip-tests
	tests/run.sh $(BUILD)

deps:
	@tools/install-deps.sh

# The program, and a service for systemd with its settings (which are not overwritten). DESTDIR: a folder to install into instead of /.
PREFIX ?= /usr/local
install: all
	install -D -m 755 $(BUILD)/bedside "$(DESTDIR)$(PREFIX)/bin/bedside"
	install -d "$(DESTDIR)$(PREFIX)/lib/systemd/system" "$(DESTDIR)/etc"
	sed 's|@BIN@|$(PREFIX)/bin/bedside|' tools/bedside.service.in >"$(DESTDIR)$(PREFIX)/lib/systemd/system/bedside.service"
	[ -e "$(DESTDIR)/etc/bedside.conf" ] || install -m 644 tools/bedside.conf "$(DESTDIR)/etc/bedside.conf"

uninstall:
	rm -f "$(DESTDIR)$(PREFIX)/bin/bedside" "$(DESTDIR)$(PREFIX)/lib/systemd/system/bedside.service"
	@echo "left where they are, as they are yours: $(DESTDIR)/etc/bedside.conf, and what the service cached in /var/lib/bedside"

tests: $(TESTS)
bench: $(BENCHES) $(BUILD)/hip/libamdhip64-emu.so

$(BUILD)/bedside: $(BUILD)/obj/server/main.o $(LIB)
	$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS) -pie

$(LIB): $(OBJ)
	@rm -f $@
	ar rcs $@ $^

$(BUILD)/obj/engine/cpu/%_avx2.o:   ISA = $(HOT) $(AVX2)
$(BUILD)/obj/engine/cpu/%_avx512.o: ISA = $(HOT) $(AVX512)

$(BUILD)/obj/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(ISA) -MMD -MP -c -o $@ $<

$(BUILD)/tests/unit/%: tests/unit/%.c $(LIB)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -MF $@.d -o $@ $< $(LIB) -lcmocka $(LDLIBS)

$(BUILD)/tests/golden/%: tests/golden/%.c $(LIB)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -MF $@.d -o $@ $< $(LIB) -lcmocka $(LDLIBS)

$(BUILD)/tests/bench/%: tests/bench/%.c $(LIB)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -MF $@.d -o $@ $< $(LIB) $(LDLIBS)

include tests/hip/hip.mk

# The tests under AddressSanitizer and UndefinedBehaviorSanitizer.
asan: deps
	@$(MAKE) --no-print-directory -j$(JOBS) BUILD=build-asan HIP_TARGETS="gfx1100 gfx1152 gfx1201" OPT="-O1 -g" HOT=-O1 SAN="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer" all tests hip-tests
	tests/run.sh build-asan

# A minute of fuzzing for each target (FUZZ_SECONDS to change), with clang's libFuzzer.
FUZZ_SECONDS ?= 60
fuzz:
	@$(MAKE) --no-print-directory -j$(JOBS) BUILD=build-fuzz HIP_TARGETS= CC=clang OPT="-O1 -g" HOT=-O1 SAN="-fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover=all" fuzzers
	tests/fuzz/run.sh build-fuzz $(FUZZ_SECONDS)

fuzzers: $(FUZZERS)
$(BUILD)/tests/fuzz/%: tests/fuzz/%.c $(LIB)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -fsanitize=fuzzer -MMD -MP -MF $@.d -o $@ $< $(LIB) $(LDLIBS)

# 64 clients, cancels and kill -9 for ten minutes (LOAD_SECONDS to change), and the gap between tokens beside a long prompt.
LOAD_SECONDS ?= 600
load: deps
	@$(MAKE) --no-print-directory -j$(JOBS) all
	@[ -d tests/http/node_modules ] || (cd tests/http && npm ci --no-audit --no-fund)
	BEDSIDE=$(BUILD)/bedside node tests/load/load.mjs $(LOAD_SECONDS)

clang:
	@$(MAKE) --no-print-directory -j$(JOBS) BUILD=build-clang HIP_TARGETS= CC=clang EMU_CC=cc all tests bench

check:
	tools/check.sh

help:
	@echo "make run [MODEL=file.gguf]  install what is missing, build, serve on http://127.0.0.1:8080"
	@echo "make test                   install, build, run every test"
	@echo "make test-hip               every GPU test: all kernels on the emulator and the shim, whole models"
	@echo "make                        build/bedside only"
	@echo "make install [PREFIX=/usr/local]  the program, and a service for systemd; make uninstall"
	@echo "make asan | clang | check | fuzz | bench | load"
	@echo "make clean"

clean:
	rm -rf build build-*

-include $(DEPS)
.PHONY: all run test deps install uninstall tests bench load asan fuzz fuzzers clang check help clean
.DELETE_ON_ERROR:
