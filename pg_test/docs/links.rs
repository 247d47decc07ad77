//! Links in Markdown files: to files of the checkout, and to headings.

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// What leads nowhere, one line each. Links to elsewhere are not followed.
pub fn broken(checkout: &Path, files: &[PathBuf]) -> Vec<String> {
    let mut broken = Vec::new();
    let mut anchors: HashMap<PathBuf, Vec<String>> = HashMap::new();
    for file in files {
        let text = std::fs::read_to_string(checkout.join(file)).expect("a file");
        for (event, range) in Parser::new_ext(&text, Options::ENABLE_TABLES).into_offset_iter() {
            let (Event::Start(Tag::Link { dest_url, .. }) | Event::Start(Tag::Image { dest_url, .. })) = event else {
                continue;
            };
            if dest_url.contains(':') {
                continue;
            }
            let line = 1 + text[..range.start].matches('\n').count();
            let (path, anchor) = dest_url.split_once('#').unwrap_or((&dest_url, ""));
            let folder = checkout.join(file).parent().expect("its folder").to_owned();
            let target = if path.is_empty() { checkout.join(file) } else { folder.join(path) };
            if !target.exists() {
                broken.push(format!("{}:{line}: there is no {dest_url}", file.display()));
            } else if !anchor.is_empty() && target.extension().is_some_and(|extension| extension == "md") {
                let known = anchors.entry(target.clone()).or_insert_with(|| headings(&target));
                if !known.iter().any(|known| known == anchor) {
                    broken.push(format!("{}:{line}: there is no heading {dest_url}", file.display()));
                }
            }
        }
    }
    broken
}

/// The anchors of a file's headings, by which GitHub and mdBook know them.
fn headings(file: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(file).expect("a file");
    let (mut anchors, mut heading): (Vec<String>, Option<String>) = (Vec::new(), None);
    for event in Parser::new_ext(&text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(text) | Event::Code(text) => {
                if let Some(heading) = &mut heading {
                    *heading += &text;
                }
            }
            Event::End(TagEnd::Heading(_)) => {
                let anchor = anchor(&heading.take().unwrap_or_default());
                // The second of the same name has a number.
                let mut numbered = (1..).map(|number| format!("{anchor}-{number}"));
                let known = anchors.contains(&anchor);
                let unlike = if known { numbered.find(|numbered| !anchors.contains(numbered)) } else { None };
                anchors.push(unlike.unwrap_or(anchor));
            }
            _ => {}
        }
    }
    anchors
}

fn anchor(heading: &str) -> String {
    let letter = |letter: char| match letter {
        ' ' => Some('-'),
        '-' | '_' => Some(letter),
        _ if letter.is_alphanumeric() => Some(letter),
        _ => None,
    };
    heading.to_lowercase().chars().filter_map(letter).collect()
}
