//! The SQL functions: arguments checked and handed to one call. Their signatures are in `sql/`.

mod arguments;
mod domains;
mod leases;
mod library;
mod named;
mod native;
mod semaphores;
mod sets;
mod statistics;
mod trees;
mod views;
