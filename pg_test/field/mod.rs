//! How it is used in the field, as far as it can be shown from here: behind PgBouncer, and by those who come from something
//! else. `make field` runs these and goes on with other languages, failover and chaos, in the folder `field/`.

mod moving_over;
mod poolers;
