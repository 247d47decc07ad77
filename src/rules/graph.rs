//! Who waits for whom, as a picture.

use std::collections::BTreeMap;

/// One session that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The process that waits.
    pub waiter: i32,
    /// The processes it waits for; 0 stands for a prepared transaction.
    pub blocked_by: Vec<i32>,
    /// What it waits for.
    pub lock: String,
}

/// Mermaid flowchart of the edges: a node for each process, an arrow from each waiter to whom it waits for.
///
/// `labels` has a second line for the nodes of some processes.
pub fn mermaid(edges: &[Edge], labels: &BTreeMap<i32, String>) -> String {
    let mut nodes = BTreeMap::new();
    for edge in edges {
        for &pid in edge.blocked_by.iter().chain([&edge.waiter]) {
            nodes.entry(pid).or_insert_with(|| node(pid, labels.get(&pid)));
        }
    }
    let mut text = String::from("flowchart LR\n");
    for node in nodes.into_values() {
        text.push_str(&node);
    }
    for edge in edges {
        for pid in &edge.blocked_by {
            text.push_str(&format!("    p{} -->|\"{}\"| p{pid}\n", edge.waiter, escape(&edge.lock)));
        }
    }
    text
}

fn node(pid: i32, label: Option<&String>) -> String {
    let title = if pid == 0 { "prepared transaction".to_owned() } else { format!("pid {pid}") };
    match label {
        Some(label) if !label.is_empty() => format!("    p{pid}[\"{title}<br/>{}\"]\n", escape(label)),
        _ => format!("    p{pid}[\"{title}\"]\n"),
    }
}

/// Names may hold anything: characters with a meaning in Mermaid or HTML are written as entities.
fn escape(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut escaped, c| {
        match c {
            '"' | '#' | '<' | '>' | '&' | '|' | '`' | '\\' => escaped.push_str(&format!("#{};", u32::from(c))),
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
        escaped
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_of_waiters() {
        let edges = [
            Edge { waiter: 2, blocked_by: vec![1], lock: "migrate:app".into() },
            Edge { waiter: 3, blocked_by: vec![1, 2], lock: "say \"hi\"|x\n".into() },
        ];
        let labels = BTreeMap::from([(1, "pod-a".to_owned()), (9, "elsewhere".to_owned())]);
        assert_eq!(
            mermaid(&edges, &labels),
            "flowchart LR\n    p1[\"pid 1<br/>pod-a\"]\n    p2[\"pid 2\"]\n    p3[\"pid 3\"]\n    \
             p2 -->|\"migrate:app\"| p1\n    p3 -->|\"say #34;hi#34;#124;x \"| p1\n    \
             p3 -->|\"say #34;hi#34;#124;x \"| p2\n"
        );
    }

    #[test]
    fn nobody_waits() {
        assert_eq!(mermaid(&[], &BTreeMap::new()), "flowchart LR\n");
    }
}
