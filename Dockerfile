# PostgreSQL with named_locks in it, on the official image:
#
#     docker build --build-arg PG_MAJOR=17 --tag postgres-named-locks:17 .
#     docker run --env POSTGRES_PASSWORD=secret postgres-named-locks:17
#
# Then CREATE EXTENSION named_locks in each database that is to have it.
ARG PG_MAJOR=15
ARG DEBIAN=bookworm
ARG RUST=1.95.0

FROM rust:${RUST}-slim-${DEBIAN} AS rust

# In the image it is for, so that it is linked with that one's libraries.
FROM postgres:${PG_MAJOR}-${DEBIAN} AS build
ARG PG_MAJOR
COPY --from=rust /usr/local/rustup /usr/local/rustup
COPY --from=rust /usr/local/cargo /usr/local/cargo
ENV RUSTUP_HOME=/usr/local/rustup CARGO_HOME=/usr/local/cargo PATH=/usr/local/cargo/bin:$PATH
# The image's own apt has the headers for its server; of which release is the image's choice.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates "postgresql-server-dev-$PG_MAJOR" \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /named_locks
# These two alone say which tools building needs: other changes leave them as they are.
COPY Cargo.toml ./
COPY .ci .ci
RUN .ci/setup --tools
COPY . .
RUN make install PG_CONFIG="/usr/lib/postgresql/$PG_MAJOR/bin/pg_config" DESTDIR=/installed

FROM postgres:${PG_MAJOR}-${DEBIAN}
COPY --from=build /installed/ /
