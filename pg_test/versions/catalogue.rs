//! What the extension is made of, as the catalogue has it.

use crate::pg_test::support::Session;
use std::collections::BTreeMap;

/// What a database's catalogue says of the extension's objects in its schema, by what it is and what it is about.
pub type Facts = BTreeMap<String, String>;

/// All about the extension's objects: definitions, columns, indexes, constraints, rights, owners, comments, dependencies.
/// Where there is a statement that makes it so, that is what is said.
#[track_caller]
pub fn facts(session: &mut Session) -> Facts {
    let rows = session.run(
        "with extension as (
            select * from pg_extension where extname = 'named_locks'
         ), members as (
            select d.classid, d.objid
              from pg_depend as d
             cross join lateral pg_identify_object(d.classid, d.objid, 0) as i
             where d.refclassid = 'pg_extension'::regclass and d.deptype = 'e'
               and d.refobjid = (select oid from extension)
               and i.schema = (select extnamespace::regnamespace::text from extension)
         ), relations as (
            select objid as oid from members where classid = 'pg_class'::regclass
         ), parts as (
            select classid, objid from members
             union
            select 'pg_trigger'::regclass, oid from pg_trigger where tgrelid in (select oid from relations)
             union
            select 'pg_constraint'::regclass, oid from pg_constraint where conrelid in (select oid from relations)
             union
            select 'pg_class'::regclass, indexrelid from pg_index where indrelid in (select oid from relations)
             union
            select 'pg_rewrite'::regclass, oid from pg_rewrite where ev_class in (select oid from relations)
             union
            select 'pg_attrdef'::regclass, oid from pg_attrdef where adrelid in (select oid from relations)
             union
            select 'pg_type'::regclass, oid from pg_type where typrelid in (select oid from relations)
         ), objects as (
            select p.classid, p.objid, i.type, i.identity, format('%s %s', i.type, i.identity) as object
              from parts as p cross join lateral pg_identify_object(p.classid, p.objid, 0) as i
         )
         select 'extension named_locks',
                format('version %s, relocatable %s, owner %s, schema %s, dumped with data: %s; %s',
                       extversion, extrelocatable, extowner::regrole, extnamespace::regnamespace,
                       (select string_agg(format('%s %L', c.oid::regclass, c.condition), ', ' order by c.oid::regclass::text)
                          from unnest(extconfig, extcondition) as c (oid, condition)),
                       obj_description(oid, 'pg_extension'))
           from extension
          union all
         select 'member ' || o.object, '' from objects as o join members as m using (classid, objid)
          union all
         select 'comment on ' || i.type || ' ' || i.identity,
                format('COMMENT ON %s %s IS %L;',
                       upper(case when i.type like '% column' then 'column' else i.type end), i.identity, d.description)
           from pg_description as d
           join objects as o on o.classid = d.classoid and o.objid = d.objoid
          cross join lateral pg_identify_object(d.classoid, d.objoid, d.objsubid) as i
          union all
         select 'dependencies of ' || i.type || ' ' || i.identity,
                string_agg(format('%s %s %s', d.deptype, r.type, r.identity), ', '
                           order by d.deptype, r.type, r.identity)
           from pg_depend as d
           join objects as o using (classid, objid)
          cross join lateral pg_identify_object(d.classid, d.objid, d.objsubid) as i
          cross join lateral pg_identify_object(d.refclassid, d.refobjid, d.refobjsubid) as r
          group by i.type, i.identity
          union all
         select 'initial rights on ' || i.type || ' ' || i.identity, format('%s %s', p.privtype, p.initprivs)
           from pg_init_privs as p
           join objects as o on o.classid = p.classoid and o.objid = p.objoid
          cross join lateral pg_identify_object(p.classoid, p.objoid, p.objsubid) as i
          union all
         select 'definition of ' || o.object, pg_get_functiondef(p.oid) || ';'
           from objects as o join pg_proc as p on o.classid = 'pg_proc'::regclass and p.oid = o.objid
          union all
         select 'owner and rights of ' || o.object, format('%s %s', p.proowner::regrole, p.proacl)
           from objects as o join pg_proc as p on o.classid = 'pg_proc'::regclass and p.oid = o.objid
          union all
         select 'owner and rights of ' || o.object, format('%s %s', c.relowner::regrole, c.relacl)
           from objects as o join pg_class as c on o.classid = 'pg_class'::regclass and c.oid = o.objid
          union all
         select 'owner and rights of ' || o.object, format('%s %s', t.typowner::regrole, t.typacl)
           from objects as o join pg_type as t on o.classid = 'pg_type'::regclass and t.oid = o.objid
          union all
         select 'definition of ' || o.object,
                concat_ws(' ', c.relkind, c.relpersistence, c.relreplident, c.relrowsecurity, c.relforcerowsecurity,
                          (select amname from pg_am where oid = c.relam), c.reltablespace, c.reloptions,
                          case when c.relkind = 'v' then pg_get_viewdef(c.oid) end,
                          case when c.relkind = 'i' then pg_get_indexdef(c.oid) end,
                          (select concat_ws(' ', indisclustered, indisreplident, indisvalid) from pg_index
                            where indexrelid = c.oid),
                          (select concat_ws(' ', seqtypid::regtype, seqstart, seqincrement, seqmax, seqmin, seqcache, seqcycle)
                             from pg_sequence where seqrelid = c.oid))
           from objects as o join pg_class as c on o.classid = 'pg_class'::regclass and c.oid = o.objid
          union all
         select format('column %s of %s', quote_ident(a.attname), o.object),
                concat_ws(' ', a.attnum, format_type(a.atttypid, a.atttypmod), a.attnotnull,
                          nullif(a.attcollation, 0)::regcollation, a.attstorage, nullif(a.attcompression, ''),
                          nullif(a.attidentity, ''), nullif(a.attgenerated, ''), a.attstattarget, a.attacl,
                          -- PostgreSQL 15.20 marks each column that it makes with a number of its own.
                          (select array_agg(o) from unnest(a.attoptions) as o where o not like 'pg_attver=%'),
                          pg_get_expr(d.adbin, d.adrelid))
           from objects as o
           join pg_attribute as a on o.classid = 'pg_class'::regclass and a.attrelid = o.objid
           left join pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
          where a.attnum > 0 and not a.attisdropped
          union all
         select 'definition of ' || o.object, concat_ws(' ', pg_get_constraintdef(c.oid), c.convalidated, c.condeferrable)
           from objects as o join pg_constraint as c on o.classid = 'pg_constraint'::regclass and c.oid = o.objid
          union all
         select 'definition of ' || o.object, concat_ws(' ', pg_get_triggerdef(t.oid), t.tgenabled)
           from objects as o join pg_trigger as t on o.classid = 'pg_trigger'::regclass and t.oid = o.objid
          union all
         select 'definition of ' || o.object, concat_ws(' ', r.ev_type, r.ev_enabled, r.is_instead)
           from objects as o join pg_rewrite as r on o.classid = 'pg_rewrite'::regclass and r.oid = o.objid
          union all
         select 'definition of ' || o.object,
                concat_ws(' ', t.typtype, t.typcategory,
                          (select string_agg(quote_literal(e.enumlabel), ', ' order by e.enumsortorder) from pg_enum as e
                            where e.enumtypid = t.oid))
           from objects as o join pg_type as t on o.classid = 'pg_type'::regclass and t.oid = o.objid",
    );
    let count = rows.len();
    let text = |row: &postgres::SimpleQueryRow, column| row.get(column).unwrap_or("NULL").to_owned();
    let facts: Facts = rows.iter().map(|row| (text(row, 0), text(row, 1))).collect();
    assert_eq!(facts.len(), count, "each fact has a name of its own");
    facts
}

/// In what facts differ from those that are expected; nothing where they are the same. Statements that would make them
/// the same come first, as an update script has them.
pub fn differences(expected: &Facts, found: &Facts) -> Vec<String> {
    let only_in = |one: &Facts, other: &Facts| -> Vec<(String, String)> {
        let differs = |(name, fact): &(&String, &String)| other.get(*name) != Some(fact);
        one.iter().filter(differs).map(|(name, fact)| (name.clone(), fact.clone())).collect()
    };
    let (lacking, rest): (Vec<_>, Vec<_>) =
        only_in(expected, found).into_iter().partition(|(_, fact)| fact.ends_with(';'));
    let statements =
        lacking.iter().map(|(_, fact)| fact.replace(" public.", " @extschema@.").replace(",public.", ",@extschema@."));
    let lacks = rest.iter().map(|(name, fact)| format!("-- lacks the {name}: {fact}"));
    let surplus = only_in(found, expected);
    let has = surplus
        .iter()
        .filter(|(name, _)| !lacking.iter().any(|(lacking, _)| lacking == name))
        .map(|(name, fact)| format!("-- has the {name}: {fact}"));
    statements.chain(lacks).chain(has).collect()
}
