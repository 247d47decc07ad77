//! Orders to the holders: to hand over, or that their grants are broken.

use super::table::{self, NewRow, Others, Row, Written};
use super::{Lease, current_role, fencing};
use crate::rules::lease::Grant;
use crate::server::activity;
use crate::server::report::Problem;
use crate::server::session::{self, Touch};
use pgrx::pg_sys;

impl Lease<'_> {
    /// Asks all holders to hand over; false if there is none. `reason` in the database's encoding.
    ///
    /// # Errors
    /// The server's.
    pub fn request(&self, reason: &[u8]) -> Result<bool, Problem> {
        self.check_may_write("request")?;
        let state = self.state(false)?;
        let mut is_held = false;
        for row in state.live.iter().filter(|row| self.is_held(row)) {
            self.order(row, Some(reason), &state.orders)?;
            is_held = true;
        }
        Ok(is_held)
    }

    /// Ends all grants, kept ones too; how many.
    ///
    /// # Errors
    /// [`Error::NotYourLease`], the server's.
    pub fn break_all(&self) -> Result<u64, Problem> {
        self.check_may_write("break")?;
        let may_break_any = activity::may_act_as(pg_sys::ROLE_PG_SIGNAL_BACKEND.into());
        let mut ended = 0;
        loop {
            let state = self.state(false)?;
            let mut is_done = true;
            for row in state.live.iter().filter(|row| row.name == self.name.bytes()) {
                if !may_break_any {
                    self.check_owner(row, "break")?;
                }
                session::change_lease(self.key, Touch::Grant);
                match table::delete(&self.tables, row, Others::Skip)? {
                    Written::Done => self.clear_orders(row.grant.token, &state.orders)?,
                    Written::Changed => {
                        is_done = false;
                        continue;
                    }
                    // The holder has an unfinished renewal, say: it is not waited for.
                    Written::Busy => self.order(row, None, &state.orders)?,
                }
                ended += 1;
            }
            if is_done {
                return Ok(ended);
            }
        }
    }

    /// Asks the holder of a grant to hand over for a reason, or (None) ends the grant. Waits for nobody: each order is a row of
    /// its own, and takes the place of those before it.
    fn order(&self, row: &Row, reason: Option<&[u8]>, orders: &[Row]) -> Result<(), Problem> {
        let is_break = reason.is_none();
        session::change_lease(self.key, if is_break { Touch::Grant } else { Touch::Prolong });
        let token = -fencing::draw(&self.tables)?;
        let grant = Grant { token, role: current_role(), bound: None, kept: is_break, ..row.grant };
        let (name, owner) = (self.name.bytes(), activity::application_or_role());
        let for_token = Some(row.grant.token);
        let order = NewRow { key: self.key, grant, for_token, name, owner: &owner, requested: reason, payload: None };
        table::insert(&self.tables, &order)?;
        let before = orders.iter().filter(|order| order.for_token == for_token && (is_break || !order.is_break()));
        for order in before {
            table::delete(&self.tables, order, Others::Skip)?;
        }
        Ok(())
    }

    /// Deletes the orders about a grant that has ended.
    pub(super) fn clear_orders(&self, token: i64, orders: &[Row]) -> Result<(), Problem> {
        for order in orders.iter().filter(|order| order.for_token == Some(token)) {
            table::delete(&self.tables, order, Others::Skip)?;
        }
        Ok(())
    }
}
