//! From a page's Markdown to what is to be done.

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

/// Languages of blocks that are neither SQL nor its output.
const OTHERS: &[&str] = &[
    "sh",
    "ini",
    "log",
    "mermaid",
    "python",
    "rust",
    "go",
    "java",
    "javascript",
    "json",
    "yaml",
    "toml",
    "c",
    "ruby",
    "dockerfile",
    "diff",
];

/// The session of blocks that name none.
const DEFAULT_SESSION: &str = "psql";

/// What a page wants to be run, with the line of each, and why which blocks are not.
#[derive(Debug, Default)]
pub struct Page {
    pub steps: Vec<(usize, Step)>,
    pub not_run: Vec<String>,
}

impl Page {
    /// Whether it begins where there is no extension yet.
    pub fn creates_the_extension(&self) -> bool {
        self.steps.iter().any(|(_, step)| match step {
            Step::Output { sql, .. } | Step::Arrows { sql, .. } | Step::Waits { sql, .. } => {
                sql.contains("CREATE EXTENSION named_locks")
            }
            Step::GoesOn { .. } => false,
        })
    }
}

/// One block and its output.
#[derive(Debug)]
pub enum Step {
    /// The output is a block of its own, but for what is behind arrows.
    Output { session: String, sql: String, shown: String },
    /// All output is behind arrows.
    Arrows { session: String, sql: String },
    /// It is to wait.
    Waits { session: String, sql: String },
    /// The output of what has waited.
    GoesOn { session: String, shown: String },
}

impl Step {
    pub fn session(&self) -> &str {
        match self {
            Step::Output { session, .. }
            | Step::Arrows { session, .. }
            | Step::Waits { session, .. }
            | Step::GoesOn { session, .. } => session,
        }
    }
}

#[derive(Clone)]
enum Marker {
    Session(String),
    Waits(String),
    GoesOn(String),
    NotRun(String),
}

/// Reads a page. An error begins with the line.
pub fn parse(text: &str) -> Result<Page, String> {
    let mut reader = Reader { page: Page::default(), marker: None, last_is_sql: false };
    let mut events = Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter();
    while let Some((event, range)) = events.next() {
        let line = 1 + text[..range.start].matches('\n').count();
        let at = |problem: String| format!("{line}: {problem}");
        match event {
            Event::Start(Tag::CodeBlock(kind)) => {
                let CodeBlockKind::Fenced(info) = kind else {
                    return Err(at("a block of code has a fence and a language".into()));
                };
                let source = text[range].trim_end();
                let fence = &source[..source.len() - source.trim_start_matches(['`', '~']).len()];
                if source.lines().count() < 2 || source.lines().last().is_none_or(|last| last.trim() != fence) {
                    return Err(at("the block is never closed".into()));
                }
                let mut code = String::new();
                for (event, _) in events.by_ref() {
                    match event {
                        Event::Text(text) => code += &text,
                        Event::End(TagEnd::CodeBlock) => break,
                        other => return Err(at(format!("in a block of code: {other:?}"))),
                    }
                }
                reader.block(info.split_whitespace().next().unwrap_or_default(), code, line).map_err(at)?;
            }
            Event::Start(Tag::HtmlBlock) => {
                let html = text[range].trim();
                if html.starts_with("<!--") {
                    reader.comment(html).map_err(at)?;
                } else {
                    reader.between().map_err(at)?;
                }
            }
            Event::InlineHtml(html) if html.starts_with("<!--") => {
                return Err(at("a comment stands in a line of its own".into()));
            }
            Event::Start(Tag::Paragraph | Tag::Heading { .. } | Tag::List(_) | Tag::Table(_) | Tag::BlockQuote(_))
            | Event::Rule => {
                reader.between().map_err(at)?;
            }
            _ => {}
        }
    }
    reader.between().map_err(|problem| format!("end: {problem}"))?;
    Ok(reader.page)
}

struct Reader {
    page: Page,
    /// For the block that comes next.
    marker: Option<Marker>,
    /// The last block was SQL that is run, and has no output yet.
    last_is_sql: bool,
}

impl Reader {
    /// Something that is no block of code.
    fn between(&mut self) -> Result<(), String> {
        match self.marker.take() {
            Some(_) => Err("a marker wants its block right behind it".into()),
            None => Ok(()),
        }
    }

    fn comment(&mut self, html: &str) -> Result<(), String> {
        self.between()?;
        let Some(comment) = html.strip_prefix("<!--").and_then(|html| html.strip_suffix("-->")) else {
            return Err(format!("the comment is never closed, or has something behind it: {html}"));
        };
        let Some(marker) = comment.trim().strip_prefix("test:").map(str::trim) else {
            // A comment that swallows a block is hardly meant.
            return if comment.contains("```") { Err("a comment with blocks of code in it".into()) } else { Ok(()) };
        };
        if marker.contains('\n') {
            return Err(format!("a marker is one line: {html}"));
        }
        self.marker = Some(Marker::read(marker).ok_or_else(|| format!("no such marker: {marker}"))?);
        Ok(())
    }

    fn block(&mut self, language: &str, code: String, line: usize) -> Result<(), String> {
        let marker = self.marker.take();
        match language {
            "sql" => self.sql(marker, code, line),
            "text" => self.text(marker, code, line),
            other if OTHERS.contains(&other) => {
                self.last_is_sql = false;
                if marker.is_some() { Err(format!("a marker is not for a block of {other}")) } else { Ok(()) }
            }
            other => {
                Err(format!("a block of the language \"{other}\": sql, text for its output, or one of {OTHERS:?}"))
            }
        }
    }

    fn sql(&mut self, marker: Option<Marker>, sql: String, line: usize) -> Result<(), String> {
        self.last_is_sql = false;
        let step = match marker {
            Some(Marker::NotRun(reason)) => {
                self.page.not_run.push(reason);
                return Ok(());
            }
            Some(Marker::GoesOn(_)) => return Err("a session that goes on shows output, a block of text".into()),
            Some(Marker::Waits(session)) => Step::Waits { session, sql },
            Some(Marker::Session(session)) => Step::Arrows { session, sql },
            None => Step::Arrows { session: DEFAULT_SESSION.into(), sql },
        };
        self.last_is_sql = matches!(step, Step::Arrows { .. });
        let (Step::Arrows { sql, .. } | Step::Waits { sql, .. }) = &step else { unreachable!() };
        // psql would wait for the rest.
        let mut statements = sql.lines().map(|line| line.split("--").next().unwrap_or_default().trim());
        match statements.rfind(|line| !line.is_empty()) {
            Some(last) if last.ends_with(';') || last.contains('\\') => {}
            _ => return Err("the last statement has no end".into()),
        }
        self.page.steps.push((line, step));
        Ok(())
    }

    fn text(&mut self, marker: Option<Marker>, shown: String, line: usize) -> Result<(), String> {
        let after_sql = std::mem::take(&mut self.last_is_sql);
        match marker {
            Some(Marker::GoesOn(session)) => {
                self.page.steps.push((line, Step::GoesOn { session, shown }));
                Ok(())
            }
            Some(_) => Err("such a marker is not for a block of text".into()),
            None if after_sql => {
                let Some((line, Step::Arrows { session, sql })) = self.page.steps.pop() else { unreachable!() };
                self.page.steps.push((line, Step::Output { session, sql, shown }));
                Ok(())
            }
            None => Err("output of no block of SQL".into()),
        }
    }
}

impl Marker {
    fn read(text: &str) -> Option<Marker> {
        let word = |text: &str| {
            let fits = !text.is_empty() && text.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '-');
            fits.then(|| text.to_owned())
        };
        if let Some(reason) = text.strip_prefix("not run:") {
            let reason = reason.trim();
            return (!reason.is_empty()).then(|| Marker::NotRun(reason.to_owned()));
        }
        let session = text.strip_prefix("session ")?;
        if let Some(session) = session.strip_suffix(", waits") {
            word(session).map(Marker::Waits)
        } else if let Some(session) = session.strip_suffix(" goes on") {
            word(session).map(Marker::GoesOn)
        } else {
            word(session).map(Marker::Session)
        }
    }
}
