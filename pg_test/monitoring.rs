//! The examples of monitoring: every query runs and gives what its metrics name, and the dashboard shows metrics that exist.

use super::support::lease_queue::{self, take};
use super::support::{Cluster, Session};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// A metric: which query gives it, in which column, with which columns as labels.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Metric {
    query: String,
    column: String,
    kind: String,
    labels: BTreeSet<String>,
}

type Metrics = BTreeMap<String, Metric>;

fn yaml(text: &str) -> Value {
    serde_yaml_ng::from_str(text).expect("YAML")
}

#[track_caller]
fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text")).to_owned()
}

#[track_caller]
fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list"))
}

/// Queries are written with different indentation.
fn query(value: &Value) -> String {
    text(value).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What postgres_exporter makes of its file.
fn of_postgres_exporter() -> Metrics {
    let mut metrics = Metrics::new();
    for (group, definition) in yaml(include_str!("../examples/monitoring/queries.yaml")).as_object().expect("groups") {
        let columns: Vec<(String, String)> = list(&definition["metrics"])
            .iter()
            .flat_map(|column| column.as_object().expect("a column"))
            .map(|(column, about)| {
                assert!(!text(&about["description"]).is_empty());
                (column.clone(), text(&about["usage"]))
            })
            .collect();
        let (labels, values): (Vec<_>, Vec<_>) = columns.into_iter().partition(|(_, usage)| usage == "LABEL");
        let labels: BTreeSet<String> = labels.into_iter().map(|(label, _)| label).collect();
        for (column, usage) in values {
            let name = format!("{group}_{column}");
            let (query, kind, labels) = (query(&definition["query"]), usage.to_lowercase(), labels.clone());
            metrics.insert(name, Metric { query, column, kind, labels });
        }
    }
    metrics
}

/// What sql_exporter makes of its own.
fn of_sql_exporter() -> Metrics {
    let collector = yaml(include_str!("../examples/monitoring/named_locks.collector.yml"));
    assert_eq!(text(&collector["collector_name"]), "named_locks");
    let queries: BTreeMap<String, String> =
        list(&collector["queries"]).iter().map(|of| (text(&of["query_name"]), query(&of["query"]))).collect();
    let metric = |of: &Value| {
        assert!(!text(&of["help"]).is_empty());
        let [value] = list(&of["values"]) else { panic!("{of}: one value is due") };
        let metric = Metric {
            query: queries[&text(&of["query_ref"])].clone(),
            column: text(value),
            kind: text(&of["type"]),
            labels: list(&of["key_labels"]).iter().map(text).collect(),
        };
        (text(&of["metric_name"]), metric)
    };
    list(&collector["metrics"]).iter().map(metric).collect()
}

/// The metrics' values, by name and labels.
#[track_caller]
fn scrape(session: &mut Session, metrics: &Metrics) -> BTreeMap<String, f64> {
    let mut scraped = BTreeMap::new();
    for (name, metric) in metrics {
        for row in session.run(&metric.query) {
            let value = |column: &String| {
                assert!(row.columns().iter().any(|of| of.name() == column), "{name}: no column {column}");
                row.get(column.as_str()).unwrap_or_else(|| panic!("{name}: {column} is NULL"))
            };
            let labels: Vec<String> = metric.labels.iter().map(|label| format!("{label}={}", value(label))).collect();
            let series = format!("{name}{{{}}}", labels.join(","));
            let number = value(&metric.column).parse().unwrap_or_else(|_| panic!("{series} is no number"));
            assert_eq!(scraped.insert(series.clone(), number), None, "{series} comes twice");
        }
    }
    scraped
}

#[test]
fn both_exporters_give_the_same_metrics() {
    let metrics = of_postgres_exporter();
    assert_eq!(metrics, of_sql_exporter());
    assert!(metrics.len() >= 15, "{}", metrics.len());
    for (name, metric) in &metrics {
        assert!(name.starts_with("named_locks_"), "{name}");
        assert!(["gauge", "counter"].contains(&metric.kind.as_str()), "{name}: {}", metric.kind);
        assert_eq!(name.ends_with("_total"), metric.kind == "counter", "{name}");
    }
}

#[test]
fn the_queries_give_what_the_metrics_name() {
    let cluster = Cluster::new(&[]);
    let metrics = of_postgres_exporter();
    let [monitor, stranger] = ["monitor", "stranger"].map(|role| cluster.new_role(role));
    let mut admin = cluster.session("admin");
    admin.run(&format!("grant pg_monitor to {monitor}"));
    // Nothing has happened.
    assert_eq!(scrape(&mut admin, &metrics), BTreeMap::new());

    let mut holder = cluster.session("holder");
    holder.run("select named_lock('jobs:a'), named_lock('jobs:b'), named_lock('plain'), advisory_lock(1)");
    holder.run("begin; select named_xact_lock('jobs:c')");
    admin.run("select pg_advisory_lock(2)");
    let mut leases = cluster.session("leases");
    take(&mut leases, "jobs:long", "1 hour");
    take(&mut leases, "jobs:short", "4 s");
    let kept = take(&mut leases, "jobs:kept", "1 hour");
    leases.run(&format!("select lease_release('jobs:kept', {kept}, '1 hour')"));
    assert!(!leases.flag("select named_lock('jobs:a', '20 ms')"));
    let waiting = cluster.session("waiter").background("select named_lock('jobs:a')");
    admin.until_waiting(waiting.pid);
    let for_lease = cluster.session("waiter").background("select lease_acquire('jobs:long', '1 hour', null)");
    lease_queue::until_queued(&mut admin, for_lease.pid, 1);

    let seen = scrape(&mut cluster.session_as(&monitor, "monitor"), &metrics);
    for (series, value) in [
        ("named_locks_held{domain=jobs,kind=session}", 2.0),
        ("named_locks_held{domain=jobs,kind=transaction}", 1.0),
        ("named_locks_held{domain=,kind=session}", 1.0),
        ("named_locks_held{domain=,kind=advisory}", 2.0),
        ("named_locks_waiting_sessions{domain=jobs,kind=session}", 1.0),
        ("named_locks_waiting_sessions{domain=jobs,kind=lease}", 1.0),
        ("named_locks_leases_live{database=postgres,domain=jobs,state=held}", 2.0),
        ("named_locks_leases_live{database=postgres,domain=jobs,state=kept}", 1.0),
        ("named_locks_leases_near_expiry{database=postgres,domain=jobs,state=held}", 1.0),
        ("named_locks_leases_near_expiry{database=postgres,domain=jobs,state=kept}", 0.0),
        ("named_locks_stats_grants_total{database=postgres,domain=jobs}", 3.0),
        ("named_locks_stats_waits_total{database=postgres,domain=jobs}", 1.0),
        ("named_locks_stats_timeouts_total{database=postgres,domain=jobs}", 1.0),
        ("named_locks_stats_leases_granted_total{database=postgres,domain=jobs}", 3.0),
    ] {
        assert_eq!(seen.get(series), Some(&value), "{series}: {seen:#?}");
    }
    for series in [
        "named_locks_longest_hold_seconds{domain=jobs,kind=session}",
        "named_locks_waiting_longest_seconds{domain=jobs,kind=session}",
        "named_locks_leases_first_expiry_seconds{database=postgres,domain=jobs,state=held}",
        "named_locks_stats_wait_seconds_total{database=postgres,domain=jobs}",
        "named_locks_stats_longest_wait_seconds{database=postgres,domain=jobs}",
    ] {
        assert!(seen.get(series).is_some_and(|&value| value > 0.0), "{series}: {seen:#?}");
    }
    let of = |series: &String| series.split_once('{').expect("labels").0.to_owned();
    assert_eq!(seen.keys().map(of).collect::<BTreeSet<_>>(), metrics.keys().cloned().collect());

    // Without the right to see other roles' names.
    let seen = scrape(&mut cluster.session_as(&stranger, "stranger"), &metrics);
    assert_eq!(seen.get("named_locks_held{domain=(hidden),kind=session}"), Some(&3.0), "{seen:#?}");
    assert_eq!(seen.get("named_locks_stats_grants_total{database=postgres,domain=(hidden)}"), Some(&3.0), "{seen:#?}");
    assert!(!seen.keys().any(|series| series.contains("jobs")), "{seen:#?}");

    holder.run("rollback; select named_unlock_all()");
    waiting.end().1.expect("no error");
    admin.run("select lease_break('jobs:long')");
    for_lease.end().1.expect("no error");
}

#[test]
fn the_dashboard_shows_metrics_that_exist() {
    let metrics = of_postgres_exporter();
    let dashboard: Value =
        serde_json::from_str(include_str!("../examples/monitoring/grafana-dashboard.json")).expect("JSON");
    let mut shown = BTreeSet::new();
    for panel in list(&dashboard["panels"]) {
        for target in list(&panel["targets"]) {
            let expression = text(&target["expr"]);
            let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let names: Vec<&str> = words.filter(|word| word.starts_with("named_locks")).collect();
            assert!(!names.is_empty(), "{expression}");
            for name in names {
                let metric = metrics.get(name).unwrap_or_else(|| panic!("{expression}: there is no {name}"));
                assert_eq!(expression.contains("rate("), metric.kind == "counter", "{expression}");
                // The labels that series are put together by, and those that their legends name.
                let grouped = expression.split("by (").skip(1).filter_map(|rest| rest.split_once(')'));
                let legend = text(&target["legendFormat"]);
                let named = legend.split("{{").skip(1).filter_map(|rest| rest.split_once("}}"));
                for label in grouped.flat_map(|(labels, _)| labels.split(", ")).chain(named.map(|(label, _)| label)) {
                    assert!(metric.labels.contains(label), "{name} has no label {label}");
                }
                shown.insert(name.to_owned());
            }
        }
    }
    for variable in list(&dashboard["templating"]["list"]).iter().filter(|variable| variable["type"] == "query") {
        let definition = text(&variable["definition"]);
        assert!(metrics.keys().any(|name| definition.contains(name.as_str())), "{definition}");
    }
    assert!(shown.len() >= 12, "{shown:?}");
}
