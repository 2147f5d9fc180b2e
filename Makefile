# Godwit's everyday commands. Each is idempotent and says what it does; `make` lists them.

CARGO ?= cargo
SOAK_MOVES ?= 1000
SOAK_GUESTS ?= 8
SOAK_MIXED_MOVES ?= 100
INSTALLED_MOVES ?= 20
ADOPTIONS ?= 10
CEPH_MOVES ?= 20
SCENARIOS ?= switchover blackout size scale bandwidth lanes references impact loss converge \
  predict cancel debian scan control-scale control-drain control-liar control-mixed cpu-baseline \
  drain devices
# Where rustup puts cargo: a root shell may lack it in its path.
export PATH := $(PATH):$(HOME)/.cargo/bin

.DEFAULT_GOAL := help
.PHONY: help deps build programs demo test check unit e2e e2e-newest sim schemathesis console \
  console-test console-speed fuzz bench reliability ha soak soak-mixed soak-disks power-cycle \
  adoption ceph image installed deb deb-test fmt fmt-check lint ci clean

# Runs end-to-end tests by name, one at a time.
END_TO_END := $(CARGO) test --locked --workspace --test end_to_end -- --nocapture --test-threads=1

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

deps: ## Install what is missing to build and run (needs root only if something is)
	@scripts/deps

build: deps ## Release build: godwit, the tracker library, the lab and its guest's image
	$(CARGO) build --release --workspace --examples --bins --lib --locked
	target/release/examples/guest_image

programs: deps ## Development build of what demo and tests run, with the engine optimised
	$(CARGO) build --workspace --lib --bins --examples --locked
	target/debug/examples/guest_image

demo: programs ## Start a lab, move a guest under load, empty a host; prints the console's address
	scripts/demo.sh

test: programs ## All tests: unit and property tests, end-to-end tests, the console in a browser
	scripts/test.sh

check: fmt-check lint unit ## Run while you write code: format, clippy, unit and property tests

unit: ## Unit and property tests
	scripts/test.sh unit

e2e: programs ## End-to-end tests: real QEMU guests in labs, two at a time
	scripts/test.sh e2e

e2e-newest: programs ## End-to-end tests with the newest QEMU of Debian's backports
	scripts/with-newest-qemu.sh scripts/test.sh e2e

sim: programs ## Simulate 10,000 lives of a guest (SIM=OPTIONS, see godwit-sim --help)
	target/debug/godwit-sim $(SIM)

bench: build ## Print the figures, all or one scenario's (SCENARIOS=switchover BENCH=OPTIONS)
	$(if $(filter debian,$(SCENARIOS)),scripts/deps --bench)
	set -e; for scenario in $(SCENARIOS); do \
	  if [ $$scenario = scan ]; then $(CARGO) bench --locked -p godwit-ram; \
	  else target/release/godwit-bench $$scenario $(BENCH); fi; \
	done

reliability: programs ## Faults at each phase of a migration; writes docs/reliability.md (FAULTS=)
	target/debug/godwit-bench faults $(or $(FAULTS),--tracking scans --tracking faults --write)

ha: programs ## Hosts of a protected VM fail in 40 ways: never two writers (HA=OPTIONS)
	scripts/deps --ha
	target/debug/godwit-bench ha $(HA)

soak: programs ## 1,000 moves of 8 guests under random faults (SOAK_MOVES=N SOAK_SEED=N)
	GODWIT_SOAK_MOVES=$(SOAK_MOVES) GODWIT_SOAK_GUESTS=$(SOAK_GUESTS) \
	  $(if $(SOAK_SEED),GODWIT_SOAK_SEED=$(SOAK_SEED)) $(END_TO_END) soak::moves_under_faults

soak-mixed: programs ## 100 random moves: throttled, page-in, cut (SOAK_MIXED_MOVES=N SOAK_SEED=N)
	GODWIT_SOAK_MOVES=$(SOAK_MIXED_MOVES) \
	  $(if $(SOAK_SEED),GODWIT_SOAK_SEED=$(SOAK_SEED)) $(END_TO_END) soak_mixed::

soak-disks: programs ## Moves with disks whose agents are killed, and into a full file system
	GODWIT_REQUIRE_TRIALS=1 $(END_TO_END) --ignored with_disks::

power-cycle: programs ## Cut the power of a host whose 20 VMs start with it; prints order and time
	GODWIT_REQUIRE_TRIALS=1 $(END_TO_END) --ignored power_cycle::

adoption: programs ## Adopt domains of libvirt live, give them back, boot imports (ADOPTIONS=N)
	scripts/deps --libvirt
	GODWIT_REQUIRE_TRIALS=1 GODWIT_ADOPTIONS=$(ADOPTIONS) \
	  scripts/with-newest-qemu.sh $(END_TO_END) adoption::libvirt adoption::live_export \
	  adoption::walk imports::

ceph: programs ## Move a guest with disks in a pool of Ceph, and its disks in and out (CEPH_MOVES=N)
	scripts/deps --ceph
	GODWIT_REQUIRE_TRIALS=1 GODWIT_CEPH_MOVES=$(CEPH_MOVES) $(END_TO_END) ceph::

image: ## Disk image of an installed Debian (lab/installed); needs root
	scripts/deps --image
	lab/installed/build.sh

installed: programs image ## Move an installed Debian with all devices (INSTALLED_MOVES=N)
	GODWIT_INSTALLED_MOVES=$(INSTALLED_MOVES) $(END_TO_END) installed::

schemathesis: programs ## Check the manager's API against its OpenAPI document (EXAMPLES=N SEED=N)
	scripts/schemathesis.sh

console: ## Build the console's files anew (web/dist, which is committed); needs Node
	scripts/console.sh --write

console-test: programs ## Test the console in a browser, simulated and real hosts; needs npm, root
	scripts/test.sh console

console-speed: build ## Speed and memory of the console at 1,000 VMs (MINUTES=30); needs npm
	cd web && npm ci --no-audit --no-fund --loglevel=error && PROFILE=release e2e/speed.sh

fuzz: ## Fuzz every decoder, an hour in all (FUZZ_SECONDS=N, FUZZ_TARGETS="frames qmp")
	scripts/fuzz.sh

deb: build ## Debian packages of command, agent and manager, in out/deb (DEB_REVISION=N)
	scripts/deb.sh

deb-test: build ## Install, run and upgrade the packages on a clean Debian 12 (systemd-nspawn)
	scripts/deb-test.sh

fmt: ## Format the sources
	$(CARGO) fmt --all

fmt-check:
	$(CARGO) fmt --all --check

lint: ## Clippy with warnings as errors
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

ci: ## What CI runs: formatting, lints, dependency policy, all tests
	.ci/run

clean: ## Remove everything that was built, fetched or cached in this folder
	rm -rf target out fuzz/target fuzz/artifacts web/node_modules
