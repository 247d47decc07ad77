# named_locks: what can be done here. Each target prepares what it needs by itself: `make test` works right after git
# clone, as root and as an ordinary user with sudo. Servers, tools and test data go into a cache folder, never into the
# system's PostgreSQL: NAMED_LOCKS_CACHE, by default /var/cache/named_locks for root, ~/.cache/named_locks for others.

# The PostgreSQL to test on, 14 to 18. 18, and 17 where no package is to be had, are built with assertions.
PG ?= 15
# Tests whose name contains this.
TEST ?=
# Arguments for the program of `make run` and `make bench`.
ARGS ?=
# The server that `make install` installs into; below the folder DESTDIR, if one is given.
PG_CONFIG ?= pg_config
export DESTDIR

.DEFAULT_GOAL := all
.PHONY: all install uninstall installcheck package package-test dist help test reference upgrade \
	field run bench docs freeze lint format audit clean distclean

# What follows is as PGXS has it, so that `make && sudo make install && make installcheck` does what it does elsewhere.

all: ## Build it for the server of PG_CONFIG=/path/to/pg_config
	.ci/build $(PG_CONFIG)

install: all ## Install it there, or below DESTDIR
	.ci/install $(PG_CONFIG)

uninstall: ## Take it away from there again
	.ci/install --remove $(PG_CONFIG)

installcheck: ## Test it on a running server, that of PGHOST, PGPORT and PGUSER
	@$(MAKE) -C pg_test/regress installcheck PG_CONFIG=$(PG_CONFIG)

package: ## Make a .deb for Debian's PostgreSQL: PG=15
	.ci/setup --package $(PG)
	.ci/package $(PG)

package-test: package ## Install that in a clean Debian and try it there
	.ci/setup --package-test $(PG)
	.ci/package-test $(PG)

dist: ## Make the archive of the sources for PGXN
	.ci/setup --dist
	.ci/dist

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

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
	CARGO_PROFILE_RELEASE_DEBUG=line-tables-only .ci/with-release $(PG) bench/run.py $(ARGS)

docs: ## Build the documentation as a site, target/book
	.ci/setup --docs
	.ci/docs

freeze: ## Write down the scripts of this version, once its SQL is as it is to be released
	.ci/setup $(PG)
	.ci/freeze $(PG)

lint: ## Check form, style and spelling, and the crates that we build with
	.ci/setup 14 $(PG)
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
