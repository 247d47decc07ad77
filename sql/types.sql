-- The lock manager's Exclusive, Share, RowShare, RowExclusive and ShareRowExclusive modes, with its own conflict table.
CREATE TYPE named_lock_mode AS ENUM (
    'exclusive',
    'share',
    'intent share',
    'intent exclusive',
    'share intent exclusive'
);
COMMENT ON TYPE named_lock_mode IS 'how a named lock is held: exclusive, share, or the intent modes of a hierarchy';
