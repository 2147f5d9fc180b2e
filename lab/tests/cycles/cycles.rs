//! Cycles of a directed graph: strongly connected components of more than one node (Tarjan 1972).

use std::collections::{BTreeMap, BTreeSet};

/// Dependencies: the names that each name uses.
pub(crate) type Uses = BTreeMap<String, BTreeSet<String>>;

/// Returns the names in the largest cycle; empty if there is none.
pub(crate) fn largest(uses: &Uses) -> Vec<String> {
    let mut all = components(uses);
    all.retain(|component| component.len() > 1);
    all.into_iter().max_by_key(Vec::len).unwrap_or_default()
}

#[derive(Default)]
struct Search<'a> {
    /// Order of the first visit, and the earliest reachable node.
    seen: BTreeMap<&'a str, (usize, usize)>,
    stack: Vec<&'a str>,
    found: Vec<Vec<String>>,
}

fn components(uses: &Uses) -> Vec<Vec<String>> {
    let mut search = Search::default();
    for node in uses.keys() {
        if !search.seen.contains_key(node.as_str()) {
            visit(&mut search, uses, node);
        }
    }
    search.found
}

fn visit<'a>(search: &mut Search<'a>, uses: &'a Uses, node: &'a str) {
    let order = search.seen.len();
    search.seen.insert(node, (order, order));
    search.stack.push(node);
    let mut lowest = order;
    for next in uses.get(node).into_iter().flatten() {
        if !search.seen.contains_key(next.as_str()) {
            visit(search, uses, next);
            lowest = lowest.min(search.seen[next.as_str()].1);
        } else if search.stack.contains(&next.as_str()) {
            lowest = lowest.min(search.seen[next.as_str()].0);
        }
    }
    search.seen.insert(node, (order, lowest));
    if lowest == order {
        let at = search.stack.iter().position(|other| *other == node).unwrap();
        let mut component: Vec<String> =
            search.stack.split_off(at).into_iter().map(str::to_owned).collect();
        component.sort_unstable();
        search.found.push(component);
    }
}

#[test]
fn the_largest_cycle_is_found_and_a_line_has_none() {
    let uses = |pairs: &[(&str, &str)]| {
        let mut uses = Uses::new();
        for (from, to) in pairs {
            uses.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        uses
    };
    assert_eq!(largest(&uses(&[("a", "b"), ("b", "c"), ("a", "c")])), Vec::<String>::new());
    let cycles = uses(&[("a", "b"), ("b", "a"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "c")]);
    assert_eq!(largest(&cycles), ["c", "d", "e"]);
}
