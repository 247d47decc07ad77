//! What is shown against what was printed.

use super::psql::{END_OF_ROW, END_OF_VALUE};
use regex::Regex;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// What differs from run to run, wherever it stands.
static VOLATILE: LazyLock<Regex> = LazyLock::new(|| {
    let pattern = r"(?x)
        (?<stamp> \d{4}-\d\d-\d\d\ \d\d:\d\d:\d\d (?:\.\d+)? [+-]\d\d (?::\d\d)? )
        | (?<time> \d\d:\d\d:\d\d (?<fraction>\.\d+)? )
        | (?<seconds> \b\d+\.\d{3}\ s\b )
        | (?: \b (?: (?: pid | [Pp]rocess | \bp ) \ ? (?<pid>\d+) | [Tt]oken\ (?<token>\d+) ) \b )
        | (?: advisory\ lock\ \[ (?<database>\d+) , )";
    Regex::new(pattern).expect("a regular expression")
});

static NUMBER: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\d+").expect("a regular expression"));
static DASHES: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"-{2,}").expect("a regular expression"));
static FOOTER: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"^\(\d+ rows?\)$").expect("a regular expression"));

/// What numbers that are shown stand for, all over a page.
#[derive(Default)]
pub struct Bindings(BTreeMap<(Kind, i64), i64>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Pid,
    Token,
    Database,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Stamp,
    /// A time of day or an interval, as it stands there.
    Time {
        text: String,
        fraction: bool,
    },
    Seconds,
    Number(Kind, i64),
}

/// Compares a block of output.
pub fn output(shown: &str, printed: &str, bindings: &mut Bindings) -> Result<(), String> {
    let differs = || format!("shown is:\n{shown}\nit printed:\n{printed}");
    same(&pieces(shown), &pieces(printed), bindings, differs)
}

/// Compares what is shown behind the arrow of a line, or nothing, with what was printed (rows for arrows) up to there.
pub fn arrow(line: &str, shown: Option<&str>, printed: &str, bindings: &mut Bindings) -> Result<(), String> {
    let (mut results, others) = results(printed);
    // Those of void.
    results.retain(|result| result.rows.is_empty() || result.rows.iter().any(|row| row != &[""]));
    let differs = || format!("{line}\nshown is: {}\nit printed:\n{printed}", shown.unwrap_or("nothing"));
    let Some(shown) = shown else {
        let nothing = results.is_empty() && others.is_empty();
        return if nothing { Ok(()) } else { Err(format!("{line}\nthis is not shown:\n{printed}")) };
    };
    match (&results[..], &others[..]) {
        ([], [first, ..]) if first.starts_with("ERROR:") => same(&pieces(shown), &pieces(first), bindings, differs),
        ([result], []) if result.rows.is_empty() && shown == "(0 rows)" => Ok(()),
        ([result], []) if !result.rows.is_empty() => {
            let of_rows = |rows: &[Vec<String>]| {
                let mut found = Vec::new();
                for row in rows {
                    for (at, cell) in row.iter().enumerate() {
                        cell_pieces(result.columns.get(at).map_or("", String::as_str), cell, &mut found);
                        found.push(Piece::Text(" | ".into()));
                    }
                    found.push(Piece::Text(" ; ".into()));
                }
                found
            };
            let shown: Vec<Vec<String>> =
                shown.split(" ; ").map(|row| row.split(" | ").map(|cell| cell.trim().to_owned()).collect()).collect();
            same(&of_rows(&shown), &of_rows(&result.rows), bindings, differs)
        }
        _ => Err(differs()),
    }
}

fn same(
    shown: &[Piece],
    printed: &[Piece],
    bindings: &mut Bindings,
    differs: impl Fn() -> String,
) -> Result<(), String> {
    if shown.len() != printed.len() {
        return Err(differs());
    }
    for pair in shown.iter().zip(printed) {
        match pair {
            (Piece::Number(kind, number), Piece::Number(other, actual)) if kind == other => {
                bindings.bind(*kind, *number, *actual).map_err(|problem| format!("{problem}\n{}", differs()))?;
            }
            (Piece::Time { fraction: true, .. }, Piece::Time { .. }) => {}
            (shown, printed) if shown == printed => {}
            _ => return Err(differs()),
        }
    }
    Ok(())
}

impl Bindings {
    fn bind(&mut self, kind: Kind, shown: i64, actual: i64) -> Result<(), String> {
        for (&(other_kind, other_shown), &other_actual) in &self.0 {
            if other_kind != kind {
                continue;
            }
            if (other_shown == shown) != (other_actual == actual) {
                return Err(format!("{kind:?} {shown} stands for {actual}, and {other_shown} for {other_actual}"));
            }
            if kind == Kind::Token && (other_shown < shown) != (other_actual < actual) {
                return Err(format!("the order of tokens {other_shown} and {shown} is another one"));
            }
        }
        self.0.insert((kind, shown), actual);
        Ok(())
    }
}

/// The kind of number that a column has.
fn kind_of(column: &str) -> Option<Kind> {
    match column {
        "pid" | "blocked_by" | "pg_blocking_pids" => Some(Kind::Pid),
        "token" => Some(Kind::Token),
        _ => None,
    }
}

/// A block of output, without what only lines up.
fn pieces(text: &str) -> Vec<Piece> {
    let mut found = Vec::new();
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let mut columns: Vec<&str> = Vec::new();
    let mut expanded = false;
    for (at, line) in lines.iter().enumerate() {
        let is_ruler = |line: &str| !line.is_empty() && line.chars().all(|letter| matches!(letter, '-' | '+'));
        if line.starts_with("-[ RECORD") || is_ruler(line) {
            expanded = line.starts_with("-[");
            found.push(Piece::Text(DASHES.replace_all(line, "--").replace("]-", "]--").replace("---", "--")));
        } else if lines.get(at + 1).is_some_and(|next| is_ruler(next)) {
            columns = line.split('|').map(str::trim).collect();
            expanded = false;
            found.push(Piece::Text(columns.join(" | ")));
        } else if expanded && let Some((column, value)) = line.split_once('|') {
            found.push(Piece::Text(format!("{} | ", column.trim())));
            cell_pieces(column.trim(), value.trim(), &mut found);
        } else if !columns.is_empty() && line.split('|').count() == columns.len() && !FOOTER.is_match(line) {
            for (column, cell) in columns.iter().zip(line.split('|')) {
                cell_pieces(column, cell.trim(), &mut found);
                found.push(Piece::Text(" | ".into()));
            }
        } else {
            columns.clear();
            expanded = false;
            cell_pieces("", &line.split_whitespace().collect::<Vec<_>>().join(" "), &mut found);
        }
        found.push(Piece::Text("\n".into()));
    }
    found
}

fn cell_pieces(column: &str, text: &str, found: &mut Vec<Piece>) {
    let literal = |text: &str, found: &mut Vec<Piece>| {
        if !text.is_empty() {
            found.push(Piece::Text(text.to_owned()));
        }
    };
    let number = |text: &str| text.parse::<i64>().ok();
    let mut from = 0;
    if let Some(kind) = kind_of(column) {
        for digits in NUMBER.find_iter(text) {
            literal(&text[from..digits.start()], found);
            match number(digits.as_str()) {
                Some(value) => found.push(Piece::Number(kind, value)),
                None => literal(digits.as_str(), found),
            }
            from = digits.end();
        }
    } else {
        for captures in VOLATILE.captures_iter(text) {
            let whole = captures.get(0).expect("the whole match");
            let (part, piece) = if let Some(part) = captures.name("stamp") {
                (part, Some(Piece::Stamp))
            } else if let Some(part) = captures.name("time") {
                let fraction = captures.name("fraction").is_some();
                (part, Some(Piece::Time { text: part.as_str().to_owned(), fraction }))
            } else if let Some(part) = captures.name("seconds") {
                (part, Some(Piece::Seconds))
            } else {
                let kinds = [("pid", Kind::Pid), ("token", Kind::Token), ("database", Kind::Database)];
                let (part, kind) = kinds
                    .into_iter()
                    .find_map(|(name, kind)| captures.name(name).map(|part| (part, kind)))
                    .expect("one of the alternatives");
                (part, number(part.as_str()).map(|value| Piece::Number(kind, value)))
            };
            let Some(piece) = piece else { continue };
            literal(&text[from..part.start()], found);
            found.push(piece);
            literal(&text[part.end()..whole.end()], found);
            from = whole.end();
        }
    }
    literal(&text[from..], found);
}

/// One result, of rows for arrows.
struct Printed {
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// Takes rows for arrows apart: the results, and all other lines.
fn results(printed: &str) -> (Vec<Printed>, Vec<&str>) {
    let (mut results, mut others) = (Vec::new(), Vec::new());
    let (mut records, mut lines) = (Vec::new(), Vec::new());
    let values = |record: &str| record.split(END_OF_VALUE).map(|value| value.trim().to_owned()).collect();
    for line in printed.lines() {
        if let Some(last) = line.strip_suffix(END_OF_ROW) {
            if records.is_empty() {
                // Names of columns; messages before them are no part of it.
                others.append(&mut lines);
            }
            lines.push(last);
            records.push(values(&std::mem::take(&mut lines).join("\n")));
        } else if FOOTER.is_match(line) && !records.is_empty() {
            let mut records = std::mem::take(&mut records).into_iter();
            results.push(Printed { columns: records.next().expect("not empty"), rows: records.collect() });
        } else {
            lines.push(line);
        }
    }
    others.append(&mut lines);
    (results, others)
}
