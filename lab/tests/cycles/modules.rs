//! Modules of a crate and the dependencies between them, found by the paths in their text that
//! begin with `crate`, `super` or a child module. Test code is left out. A path to a name that
//! `lib.rs` re-exports counts as a path to its origin.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::cycles::Uses;

/// Module, as its path below the crate: `["vms", "place"]`; empty for the root.
type Module = Vec<String>;

/// Files of a crate.
#[derive(Default)]
pub(crate) struct Crate {
    /// Text of each module without comments and tests.
    texts: BTreeMap<Module, String>,
}

impl Crate {
    /// Reads every file that is not a test.
    pub(crate) fn read(src: &Path) -> Crate {
        let mut of = Crate::default();
        let root = ["lib.rs", "main.rs"]
            .map(|name| src.join(name))
            .into_iter()
            .find(|path| path.is_file());
        if let Some(root) = root {
            of.read_module(&root, src, &[]);
        }
        of
    }

    fn read_module(&mut self, file: &Path, below: &Path, module: &[String]) {
        let text = without_tests(&without_comments(&fs::read_to_string(file).unwrap()));
        let children = children(&text);
        self.texts.insert(module.to_vec(), text);
        for child in children {
            let files = [below.join(format!("{child}.rs")), below.join(&child).join("mod.rs")];
            let Some(file) = files.into_iter().find(|file| file.is_file()) else { continue };
            let name = [module, std::slice::from_ref(&child)].concat();
            self.read_module(&file, &below.join(&child), &name);
        }
    }

    /// Returns the dependencies between files, by module.
    pub(crate) fn file_uses(&self) -> Uses {
        let name = |module: &Module| {
            if module.is_empty() { "(root)".to_owned() } else { module.join("::") }
        };
        let mut uses = Uses::new();
        for (from, to) in self.edges() {
            uses.entry(name(&from)).or_default().insert(name(&to));
        }
        uses
    }

    /// Returns the dependencies between folders at the root. A file at the root counts as a folder.
    pub(crate) fn folder_uses(&self) -> Uses {
        let mut uses = Uses::new();
        for (from, to) in self.edges() {
            if let (Some(from), Some(to)) = (from.first(), to.first())
                && from != to
            {
                uses.entry(from.clone()).or_default().insert(to.clone());
            }
        }
        uses
    }

    fn edges(&self) -> BTreeSet<(Module, Module)> {
        let exported = self.exported();
        let mut edges = BTreeSet::new();
        for (module, text) in &self.texts {
            for path in paths(text) {
                let mut target = self.resolve(module, &path);
                if target.as_ref().is_some_and(Vec::is_empty)
                    && let Some(from) = exported.get(path.get(1).unwrap_or(&String::new()))
                {
                    target = Some(from.clone());
                }
                if let Some(target) = target.filter(|target| target != module) {
                    edges.insert((module.clone(), target));
                }
            }
        }
        edges
    }

    /// Returns the names that the root re-exports, with their modules.
    fn exported(&self) -> BTreeMap<String, Module> {
        let Some(text) = self.texts.get(&Vec::new()) else { return BTreeMap::new() };
        let named = paths(text).into_iter().filter_map(|path| {
            let module = self.resolve(&Vec::new(), &path)?;
            (!module.is_empty()).then(|| (path.last().cloned().unwrap_or_default(), module))
        });
        named.collect()
    }

    /// Returns the module that a path in another module names, or that contains the named item;
    /// `None` if the path leaves the crate.
    fn resolve(&self, module: &Module, path: &[String]) -> Option<Module> {
        let mut at = match path.first()?.as_str() {
            "crate" => Vec::new(),
            "super" => module[..module.len().saturating_sub(1)].to_vec(),
            "self" => module.clone(),
            _ => {
                let below = [module.clone(), vec![path[0].clone()]].concat();
                self.texts.contains_key(&below).then_some(below)?
            }
        };
        for segment in &path[1..] {
            if segment == "super" {
                at.pop();
                continue;
            }
            let next = [at.clone(), vec![segment.clone()]].concat();
            if !self.texts.contains_key(&next) {
                break;
            }
            at = next;
        }
        Some(at)
    }
}

fn without_comments(text: &str) -> String {
    let code = |line: &str| line.split("//").next().unwrap_or_default().to_owned();
    text.lines().map(code).collect::<Vec<_>>().join("\n")
}

/// Returns the text without items under `#[cfg(test)]`.
fn without_tests(text: &str) -> String {
    let mut kept = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if !is_of_tests(line.trim()) {
            kept.push_str(line);
            kept.push('\n');
            continue;
        }
        let mut depth = 0_i64;
        for line in lines.by_ref() {
            depth += count(line, '{') - count(line, '}');
            let is_attribute = line.trim().starts_with("#[");
            if depth <= 0 && !is_attribute && line.trim().ends_with(['}', ';', ',']) {
                break;
            }
        }
    }
    kept
}

fn is_of_tests(line: &str) -> bool {
    line == "#[cfg(test)]" || line.starts_with("#[cfg(all(test,")
}

fn count(line: &str, wanted: char) -> i64 {
    i64::try_from(line.chars().filter(|char| *char == wanted).count()).unwrap()
}

/// Returns the modules that a text declares in their own files.
fn children(text: &str) -> Vec<String> {
    let declared = text.lines().filter_map(|line| {
        let line = line.trim().strip_suffix(';')?;
        let (before, name) = line.rsplit_once("mod ")?;
        (before.is_empty() || before.starts_with("pub")).then(|| name.to_owned())
    });
    declared.collect()
}

/// Returns every path with more than one segment in a text. Each branch of a `use` with braces is a
/// path.
fn paths(text: &str) -> Vec<Vec<String>> {
    let chars: Vec<char> = text.chars().collect();
    let mut found = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        if is_of_name(chars[at]) && (at == 0 || !is_of_name(chars[at - 1]) && chars[at - 1] != ':')
        {
            at = branch(&chars, at, &[], &mut found);
        } else {
            at += 1;
        }
    }
    found.retain(|path| path.len() > 1);
    found
}

fn is_of_name(char: char) -> bool {
    char.is_alphanumeric() || char == '_'
}

/// Reads a path or a branch of one and returns where it ends.
fn branch(chars: &[char], mut at: usize, before: &[String], found: &mut Vec<Vec<String>>) -> usize {
    let mut path = before.to_vec();
    loop {
        let begin = at;
        while at < chars.len() && is_of_name(chars[at]) {
            at += 1;
        }
        if at > begin {
            path.push(chars[begin..at].iter().collect());
        }
        if chars.get(at..at + 2) != Some(&[':', ':']) {
            break;
        }
        at += 2;
        if chars.get(at) == Some(&'{') {
            return branches(chars, at + 1, &path, found);
        }
        if !chars.get(at).is_some_and(|char| is_of_name(*char)) {
            break;
        }
    }
    found.push(path);
    at.max(1)
}

/// Reads all branches up to the closing brace.
fn branches(
    chars: &[char],
    mut at: usize,
    before: &[String],
    found: &mut Vec<Vec<String>>,
) -> usize {
    while at < chars.len() && chars[at] != '}' {
        if chars[at..].starts_with(&[' ', 'a', 's', ' ']) {
            // A local alias.
            at += chars[at..].iter().position(|char| matches!(char, ',' | '}')).unwrap_or(1);
        } else if is_of_name(chars[at]) {
            at = branch(chars, at, before, found);
        } else {
            at += 1;
        }
    }
    at + 1
}

#[test]
fn paths_are_read_with_their_braces() {
    let text = "use crate::a::{self, b::{C, d}, E as F};\nlet x = super::y::z(1) + w;";
    let read: Vec<String> = paths(text).into_iter().map(|path| path.join(".")).collect();
    assert_eq!(read, ["crate.a.self", "crate.a.b.C", "crate.a.b.d", "crate.a.E", "super.y.z"]);
}

#[test]
fn tests_and_comments_are_left_out() {
    let text = "mod a; // crate::x\n#[cfg(test)]\nmod tests {\n    use \
        crate::y;\n}\n#[cfg(test)]\nmod rig;\nmod b;\n";
    let kept = without_tests(&without_comments(text));
    assert_eq!(children(&kept), ["a", "b"]);
    assert!(!kept.contains("crate"));
}
