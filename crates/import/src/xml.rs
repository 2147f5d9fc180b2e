//! XML that someone else has written, bounded.

use roxmltree::{Document, Node, ParsingOptions};

use crate::definition::ImportError;

/// Most nodes of a document.
const MOST_NODES: u32 = 100_000;
/// Deepest nesting of elements. Those of libvirt and OVF have up to 12.
const MOST_DEEP: usize = 64;

/// Parses a document. One with a document type is refused, so it has no entities of its own.
pub(crate) fn parse(text: &str) -> Result<Document<'_>, ImportError> {
    // roxmltree goes down into nested elements with its own stack of calls.
    check_depth(text)?;
    let options = ParsingOptions { nodes_limit: MOST_NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).map_err(|error| match error {
        roxmltree::Error::DtdDetected => {
            ImportError::Xml("it has a document type, which could name other files".to_owned())
        }
        error => ImportError::Xml(error.to_string()),
    })?;
    Ok(document)
}

/// Counts how deep tags are nested, without regard to their names.
fn check_depth(text: &str) -> Result<(), ImportError> {
    let (mut depth, mut rest) = (0_usize, text);
    while let Some(at) = rest.find('<') {
        rest = &rest[at..];
        let (end, of) = match rest {
            _ if rest.starts_with("<!--") => ("-->", 0),
            _ if rest.starts_with("<![CDATA[") => ("]]>", 0),
            _ if rest.starts_with("<?") => ("?>", 0),
            _ if rest.starts_with("</") => (">", -1),
            _ => (">", 1),
        };
        let Some(length) = rest.find(end) else { break };
        match of {
            1 if !rest[..length].ends_with('/') => depth += 1,
            -1 => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MOST_DEEP {
            return Err(ImportError::Xml(format!("elements are nested deeper than {MOST_DEEP}")));
        }
        rest = &rest[length + end.len()..];
    }
    Ok(())
}

/// Short ways through a document. Names are local: prefixes of namespaces differ among writers.
pub(crate) trait Walk<'a>: Sized {
    /// First child element with this name.
    fn child(self, name: &str) -> Option<Self>;
    /// Child elements with this name.
    fn children_named(self, name: &str) -> Vec<Self>;
    /// Descendant by the names of the elements on the way.
    fn at(self, path: &[&str]) -> Option<Self>;
    /// Attribute by its local name.
    fn attr(self, name: &str) -> Option<&'a str>;
    /// Attribute of a child element.
    fn child_attr(self, child: &str, name: &str) -> Option<&'a str>;
    /// Text of a child element, trimmed; `None` if it is missing or empty.
    fn child_text(self, name: &str) -> Option<&'a str>;
}

impl<'a, 'i: 'a> Walk<'a> for Node<'a, 'i> {
    fn child(self, name: &str) -> Option<Self> {
        self.children().find(|node| node.is_element() && node.tag_name().name() == name)
    }

    fn children_named(self, name: &str) -> Vec<Self> {
        let all = self.children().filter(Node::is_element);
        all.filter(|node| node.tag_name().name() == name).collect()
    }

    fn at(self, path: &[&str]) -> Option<Self> {
        path.iter().try_fold(self, |node, name| node.child(name))
    }

    fn attr(self, name: &str) -> Option<&'a str> {
        self.attributes().find(|attribute| attribute.name() == name).map(|found| found.value())
    }

    fn child_attr(self, child: &str, name: &str) -> Option<&'a str> {
        self.child(child)?.attr(name)
    }

    fn child_text(self, name: &str) -> Option<&'a str> {
        self.child(name)?.text().map(str::trim).filter(|text| !text.is_empty())
    }
}

/// Escapes text for an element or an attribute. What XML 1.0 cannot contain is left out.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            '\n' | '\t' => out.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => {}
            c => out.push(c),
        }
    }
    out
}
