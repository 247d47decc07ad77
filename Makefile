# named_locks: what can be done here. Each target prepares what it needs by itself: `make test` works right after git
# clone, as root and as an ordinary user with sudo. Servers, tools and test data go into a cache folder, never into the
# system's PostgreSQL: NAMED_LOCKS_CACHE, by default /var/cache/named_locks for root, ~/.cache/named_locks for others.

# The PostgreSQL to test on, 14 to 18. 18 is built with assertions.
PG ?= 15
# Tests whose name contains this.
TEST ?=
# Arguments for the program of `make run` and `make bench`.
ARGS ?=
# The server that `make install` installs into.
PG_CONFIG ?= pg_config

.DEFAULT_GOAL := help
.PHONY: help test reference upgrade field run bench install freeze lint format audit clean distclean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

test: ## Run the tests: PG=18 another server, TEST=name only some
	.ci/setup $(PG)
	.ci/test $(PG) $(TEST)

reference: ## Write what docs/reference has from the catalogue
	.ci/setup $(PG)
	NAMED_LOCKS_WRITE_REFERENCE=1 .ci/test $(PG) reference::

upgrade: ## Test pg_upgrade from PostgreSQL 15 to 18
	.ci/setup 15 18
	.ci/upgrade 15 18

field: ## Test with poolers, frameworks, failover and chaos: ARGS=--long, ARGS="-k patroni"
	.ci/setup --field $(PG)
	$(if $(findstring -k,$(ARGS)),,.ci/test $(PG) field::)
	.ci/with-release $(PG) field/run.py $(ARGS)

run: ## Build it and try the examples
	.ci/setup $(PG)
	.ci/with-release $(PG) examples/run.py $(ARGS)

bench: ## Build it and measure it, beside MariaDB, Redis and etcd too
	.ci/setup --bench $(PG)
	.ci/with-release $(PG) bench/run.py $(ARGS)

install: ## Install into the server of PG_CONFIG=/path/to/pg_config
	.ci/setup --tools
	.ci/install $(PG_CONFIG)

freeze: ## Write down the scripts of this version, once its SQL is as it is to be released
	.ci/setup $(PG)
	.ci/freeze $(PG)

lint: ## Check form, style and spelling, and the crates that we build with
	.ci/setup $(PG)
	.ci/lint $(PG)

format: ## Format Rust, SQL and Python
	.ci/setup $(PG)
	.ci/format

audit: ## Look for known faults in the crates that we build with (needs the internet)
	.ci/setup $(PG)
	.ci/audit

clean: ## Remove what was built here
	rm -rf target

distclean: clean ## Remove the cache folder too
	.ci/clean-cache
