//! A client that sends protocol messages one by one: for pipelines, and for what a driver never does.

use super::Server;
use std::io::{Read, Write};
use std::net::TcpStream;

/// A connection without a driver. Messages are collected until [`send`](Wire::send).
pub struct Wire {
    stream: TcpStream,
    outgoing: Vec<u8>,
    /// The server process.
    pub pid: i32,
}

/// What the server answers, as far as tests look at it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A row, each value as text.
    Row(Vec<Option<String>>),
    /// A statement is complete, with its tag (`INSERT 0 1`).
    Complete(String),
    /// A portal has given the rows that were asked for, and has more.
    Suspended,
    /// The server reads the rows of a COPY now.
    CopyIn,
    /// An error's SQLSTATE.
    Error(String),
    /// The end of a query or a pipeline: `I` idle, `T` in a transaction block, `E` in one that failed.
    Ready(char),
    /// The server has closed the connection.
    Closed,
}

impl Wire {
    /// Connects as the superuser.
    pub fn open(server: &Server) -> Wire {
        Wire::open_as(server, &server.user)
    }

    /// Connects as that role.
    pub fn open_as(server: &Server, role: &str) -> Wire {
        let stream = TcpStream::connect((server.host.as_str(), server.port)).expect("connect");
        stream.set_read_timeout(Some(super::PATIENCE)).expect("a timeout");
        let mut wire = Wire { stream, outgoing: Vec::new(), pid: 0 };
        let mut startup = 196_608_i32.to_be_bytes().to_vec();
        for text in ["user", role, "database", &server.dbname, "application_name", "wire", ""] {
            startup.extend(text.as_bytes());
            startup.push(0);
        }
        wire.outgoing.extend((startup.len() as i32 + 4).to_be_bytes());
        wire.outgoing.extend(startup);
        wire.send();
        loop {
            let (kind, body) = wire.message().expect("the server answers");
            match kind {
                b'R' => assert_eq!(body, [0; 4], "the test server trusts its clients"),
                b'K' => wire.pid = i32::from_be_bytes(body[..4].try_into().expect("four bytes")),
                b'Z' => return wire,
                b'E' => panic!("cannot connect: {}", String::from_utf8_lossy(&body)),
                _ => {}
            }
        }
    }

    fn add(&mut self, kind: u8, parts: &[&[u8]]) -> &mut Wire {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        self.outgoing.push(kind);
        self.outgoing.extend((length as i32 + 4).to_be_bytes());
        parts.iter().for_each(|part| self.outgoing.extend(*part));
        self
    }

    /// A string of statements by the simple protocol.
    pub fn query(&mut self, sql: &str) -> &mut Wire {
        self.add(b'Q', &[sql.as_bytes(), b"\0"])
    }

    /// Parse and Bind: a portal that is ready to run, without parameters.
    pub fn portal(&mut self, portal: &str, sql: &str) -> &mut Wire {
        self.add(b'P', &[b"\0", sql.as_bytes(), b"\0\0\0"]);
        self.add(b'B', &[portal.as_bytes(), b"\0\0\0\0\0\0\0\0"])
    }

    /// Execute: so many rows, 0 for all.
    pub fn execute(&mut self, portal: &str, max_rows: i32) -> &mut Wire {
        self.add(b'E', &[portal.as_bytes(), b"\0", &max_rows.to_be_bytes()])
    }

    /// A whole statement of a pipeline.
    pub fn statement(&mut self, sql: &str) -> &mut Wire {
        self.portal("", sql).execute("", 0)
    }

    /// A function by its OID, its arguments as text: the "fast path", which runs no statement.
    pub fn function_call(&mut self, oid: u32, arguments: &[Option<String>]) -> &mut Wire {
        let mut body = oid.to_be_bytes().to_vec();
        body.extend([0, 0]);
        body.extend((arguments.len() as i16).to_be_bytes());
        for argument in arguments {
            match argument {
                None => body.extend((-1_i32).to_be_bytes()),
                Some(text) => {
                    body.extend((text.len() as i32).to_be_bytes());
                    body.extend(text.as_bytes());
                }
            }
        }
        self.add(b'F', &[&body, &[0, 0]])
    }

    /// Asks for the answers so far, without ending the pipeline.
    pub fn flush(&mut self) -> &mut Wire {
        self.add(b'H', &[])
    }

    /// Ends the pipeline.
    pub fn sync(&mut self) -> &mut Wire {
        self.add(b'S', &[])
    }

    /// Sends what was collected.
    pub fn send(&mut self) {
        self.stream.write_all(&std::mem::take(&mut self.outgoing)).expect("send");
    }

    /// Sends what was collected and reads to the end of the query or pipeline (or of the connection).
    pub fn replies(&mut self) -> Vec<Reply> {
        self.send();
        let mut replies = Vec::new();
        loop {
            let reply = self.reply();
            let ends = matches!(reply, Reply::Ready(_) | Reply::Closed);
            replies.push(reply);
            if ends {
                return replies;
            }
        }
    }

    /// Reads one reply.
    pub fn reply(&mut self) -> Reply {
        loop {
            let Some((kind, body)) = self.message() else { return Reply::Closed };
            return match kind {
                b'D' => Reply::Row(row(&body)),
                b'C' => Reply::Complete(text(&body)),
                b's' => Reply::Suspended,
                b'G' => Reply::CopyIn,
                b'E' => Reply::Error(sqlstate(&body)),
                b'Z' => Reply::Ready(body[0] as char),
                _ => continue,
            };
        }
    }

    fn message(&mut self) -> Option<(u8, Vec<u8>)> {
        let mut head = [0; 5];
        self.stream.read_exact(&mut head).ok()?;
        let length = i32::from_be_bytes(head[1..].try_into().expect("four bytes")) - 4;
        let mut body = vec![0; length as usize];
        self.stream.read_exact(&mut body).ok()?;
        Some((head[0], body))
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.split(|&byte| byte == 0).next().unwrap_or_default()).into_owned()
}

fn row(mut body: &[u8]) -> Vec<Option<String>> {
    let mut take = |count: usize| {
        let (taken, rest) = body.split_at(count);
        body = rest;
        taken
    };
    let columns = i16::from_be_bytes(take(2).try_into().expect("two bytes"));
    (0..columns)
        .map(|_| match i32::from_be_bytes(take(4).try_into().expect("four bytes")) {
            -1 => None,
            length => Some(String::from_utf8_lossy(take(length as usize)).into_owned()),
        })
        .collect()
}

/// The field `C` of an error.
fn sqlstate(body: &[u8]) -> String {
    body.split(|&byte| byte == 0)
        .find_map(|field| field.strip_prefix(b"C"))
        .map(|code| String::from_utf8_lossy(code).into_owned())
        .unwrap_or_default()
}
