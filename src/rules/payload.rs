//! What a payload says of a holder, in brief, for an error's DETAIL.

use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;
use std::fmt;

/// So many facts are shown.
const MAX_FACTS: usize = 5;
/// A fact has at most so many characters.
const MAX_FACT_CHARS: usize = 80;

#[derive(Deserialize)]
#[serde(untagged)]
enum Payload {
    Facts(BTreeMap<String, Fact>),
    Fact(Fact),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Fact {
    Bool(bool),
    Number(serde_json::Number),
    Text(String),
    Other(IgnoredAny),
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fact::Bool(value) => write!(f, "{value}"),
            Fact::Number(value) => write!(f, "{value}"),
            Fact::Text(value) => write!(f, "{value}"),
            Fact::Other(IgnoredAny) => Ok(()),
        }
    }
}

/// A payload's plain values, such as `address 10.0.0.7:5000, zone eu`; None where it has none.
pub fn facts(json: &[u8]) -> Option<String> {
    let facts: Vec<String> = match serde_json::from_slice(json).ok()? {
        Payload::Fact(Fact::Other(_)) => return None,
        Payload::Fact(fact) => vec![cut(fact.to_string())],
        Payload::Facts(facts) => facts
            .iter()
            .filter(|(_, fact)| !matches!(fact, Fact::Other(_)))
            .take(MAX_FACTS)
            .map(|(key, fact)| cut(format!("{key} {fact}")))
            .collect(),
    };
    (!facts.is_empty()).then(|| facts.join(", "))
}

fn cut(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(MAX_FACT_CHARS) {
        text.truncate(end);
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_values_are_shown() {
        for (json, shown) in [
            (
                r#"{"zone": "eu", "address": "10.0.0.7:5000", "weight": 1.5, "ready": true}"#,
                Some("address 10.0.0.7:5000, ready true, weight 1.5, zone eu"),
            ),
            (r#""10.0.0.7""#, Some("10.0.0.7")),
            ("17", Some("17")),
            (r#"{"a": {"b": 1}, "c": [1], "d": null, "e": "f"}"#, Some("e f")),
            ("{}", None),
            ("null", None),
            ("[1, 2]", None),
            (r#"{"a": [1]}"#, None),
        ] {
            assert_eq!(facts(json.as_bytes()).as_deref(), shown, "{json}");
        }
    }

    #[test]
    fn much_is_cut() {
        let many = (0..20).map(|n| format!("\"k{n:02}\": {n}")).collect::<Vec<_>>().join(", ");
        assert_eq!(facts(format!("{{{many}}}").as_bytes()).unwrap(), "k00 0, k01 1, k02 2, k03 3, k04 4");
        let long = facts(format!("\"{}\"", "é".repeat(500)).as_bytes()).unwrap();
        assert_eq!(long, "é".repeat(80) + "…");
    }

    #[test]
    fn what_cannot_be_read_is_not_shown() {
        assert_eq!(facts(b"{\"a\": "), None);
        assert_eq!(facts("[".repeat(10_000).as_bytes()), None);
    }
}
