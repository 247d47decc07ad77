-- The library comes first. A session may have loaded one that is older than this script, and goes on with it until its
-- end: then nothing is changed. Libraries before 1.0.0 have no function to ask.
DO LANGUAGE plpgsql $do$
DECLARE
    version CONSTANT pg_catalog.text := '1.0.0';
BEGIN
    BEGIN
        CREATE FUNCTION @extschema@._check_library(version pg_catalog.text)
        RETURNS pg_catalog.void
        VOLATILE PARALLEL UNSAFE
        LANGUAGE c AS 'MODULE_PATHNAME', 'check_library_wrapper';
    EXCEPTION WHEN undefined_function THEN
        RAISE EXCEPTION 'library of named_locks is too old for version % of the extension', version USING
            ERRCODE = 'object_not_in_prerequisite_state',
            DETAIL = 'The library that this session works with is of a version before 1.0.0.',
            HINT = E'Install the library of that version, then connect again; where a setting such as shared_preload_libraries loads it, restart the server.\nDocumentation: reference/errors.md#library-too-old';
    END;
    PERFORM @extschema@._check_library(version);
    DROP FUNCTION @extschema@._check_library(pg_catalog.text);
END
$do$;
